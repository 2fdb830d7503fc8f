// What module_kernels.cpp compiles for each instruction set.
// clang-format off: lanes.h is what the others are written in
#include "lanes.h"
#include "causal_conv1d.h"
#include "rms_norm_gated.h"
#include "aura_flash_p1.h"
// clang-format on
