// Rewrites preprocessed Metal source as C++ for OpenCL, which clang compiles together with metal/library/prelude.h.
#pragma once
#include <cstdint>
#include <string>

namespace simulator {

// The result has the same line numbers. `language_version` is (major << 16) | minor. Throws CompileError.
std::string transform_source(const std::string& preprocessed, uint32_t language_version);

}  // namespace simulator
