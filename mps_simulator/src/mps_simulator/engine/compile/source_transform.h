// Rewrites preprocessed Metal source into the C++ for OpenCL that clang compiles together with metal/library/prelude.h.
#pragma once
#include <cstdint>
#include <string>

namespace simulator {

// Keeps line numbers. `language_version` is (major << 16) | minor. Throws CompileError.
std::string transform_source(const std::string& preprocessed, uint32_t language_version);

}  // namespace simulator
