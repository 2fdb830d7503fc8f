// The Metal source of a kernel variant. Run-time compilation has no include path: the host inlines.
#pragma once
#include <string>

#include "launch/launch.h"

namespace torch_gdn {

// The shader file with each `#include "..."` inlined once (relative to shader_directory()), #line directives for the
// compiler's messages, and the line that instantiates the kernel.
std::string shader_source(const Variant& variant);

}  // namespace torch_gdn
