#include "cpu/simd/gdn_kernels.h"

#define TORCH_GDN_PER_ISA "cpu/simd/recurrent.h"
#include "cpu/simd/isa_variants.h"

namespace torch_gdn::cpu {

const RecurrentKernels& recurrent_kernels() { return TORCH_GDN_BEST_VARIANT(kRecurrentKernels); }

}  // namespace torch_gdn::cpu
