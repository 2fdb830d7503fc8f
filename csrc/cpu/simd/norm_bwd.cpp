#include "cpu/simd/layer_kernels.h"

#define TORCH_GDN_PER_ISA "cpu/simd/norm_bwd.h"
#include "cpu/simd/isa_variants.h"

namespace torch_gdn::cpu {

const NormBwdKernels& norm_bwd_kernels() { return TORCH_GDN_BEST_VARIANT(kNormBwdKernels); }

}  // namespace torch_gdn::cpu
