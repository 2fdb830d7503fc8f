#include "cpu/simd/backward_kernels.h"

#define TORCH_GDN_PER_ISA "cpu/simd/chunk_backward.h"
#include "cpu/simd/isa_variants.h"

namespace torch_gdn::cpu {

const BackwardKernels& backward_kernels() { return TORCH_GDN_BEST_VARIANT(kBackwardKernels); }

}  // namespace torch_gdn::cpu
