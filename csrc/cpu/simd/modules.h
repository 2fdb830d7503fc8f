// What layer_kernels.cpp compiles for each ISA variant.
// clang-format off: lanes.h is what the others are written in
#include "cpu/simd/lanes.h"
#include "cpu/simd/causal_conv1d.h"
#include "cpu/simd/rms_norm_gated.h"
#include "cpu/simd/aura_flash_p1.h"
// clang-format on
