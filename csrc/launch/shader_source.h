// Generates the Metal source of kernel variants. Run-time compilation has no include path, so the host inlines
// includes.
#pragma once
#include <string>

#include "launch/launch.h"

namespace torch_gdn {

// Returns the shader file with each `#include "..."` inlined once (relative to shader_directory()). Adds #line
// directives for the compiler's messages, and one line per variant that instantiates it. All variants must be in one
// file.
std::string shader_source(c10::ArrayRef<Variant> variants);

}  // namespace torch_gdn
