#include "cpu/simd/layer_kernels.h"

#define TORCH_GDN_PER_ISA "cpu/simd/causal_conv1d_bwd.h"
#include "cpu/simd/isa_variants.h"

namespace torch_gdn::cpu {

const ConvolveBwdKernels& convolve_bwd_kernels() { return TORCH_GDN_BEST_VARIANT(kConvolveBwdKernels); }

}  // namespace torch_gdn::cpu
