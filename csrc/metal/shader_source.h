// The Metal source of a launch: compilation at run time has no include path, so the host inlines.
#pragma once
#include <string>

#include "metal/launch.h"

namespace torch_gdn {

// The launch's shader file with each `#include "..."` replaced, once, by that file (relative to shader_directory()),
// with #line so that the compiler's messages name the right place; then one line that instantiates the kernel.
std::string shader_source(const Launch& launch);

}  // namespace torch_gdn
