#include "cpu/simd/trellis_kernels.h"

#define TORCH_GDN_PER_ISA "cpu/simd/trellis.h"
#include "cpu/simd/isa_variants.h"

namespace torch_gdn::cpu {

const TrellisKernels& trellis_kernels() { return TORCH_GDN_BEST_VARIANT(kTrellisKernels); }

}  // namespace torch_gdn::cpu
