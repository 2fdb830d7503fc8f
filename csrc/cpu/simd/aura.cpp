#include "cpu/simd/aura_kernels.h"

#define TORCH_GDN_PER_ISA "cpu/simd/aura.h"
#include "cpu/simd/isa_variants.h"

namespace torch_gdn::cpu {

const AuraKernels& aura_kernels() { return TORCH_GDN_BEST_VARIANT(kAuraKernels); }

}  // namespace torch_gdn::cpu
