#include "cpu/simd/layer_kernels.h"

#define TORCH_GDN_PER_ISA "cpu/simd/gdn_gating.h"
#include "cpu/simd/isa_variants.h"

namespace torch_gdn::cpu {

const GatingKernels& gating_kernels() { return TORCH_GDN_BEST_VARIANT(kGatingKernels); }

}  // namespace torch_gdn::cpu
