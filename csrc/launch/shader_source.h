// The Metal source of kernel variants. Run-time compilation has no include path: the host inlines.
#pragma once
#include <string>

#include "launch/launch.h"

namespace torch_gdn {

// The shader file with each `#include "..."` inlined once (relative to shader_directory()), #line directives for the
// compiler's messages, and a line for each variant that instantiates it. The variants are of one file.
std::string shader_source(c10::ArrayRef<Variant> variants);

}  // namespace torch_gdn
