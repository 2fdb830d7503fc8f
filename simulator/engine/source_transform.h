// Rewrites preprocessed Metal source to the C++ for OpenCL that clang compiles together with metal/library/prelude.h.
#pragma once
#include <cstdint>
#include <string>

namespace simulator {

struct LanguageOptions {
  uint32_t version = 0;    // (major << 16) | minor
  bool is_project = true;  // false: source of other houses, to which the project's own stricter rules do not apply
};

// Line numbers stay what they are. Throws CompileError.
std::string transform_source(const std::string& preprocessed, const LanguageOptions& options);

}  // namespace simulator
