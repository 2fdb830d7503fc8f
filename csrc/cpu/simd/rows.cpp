#include "cpu/simd/layer_kernels.h"
#include "cpu/simd/row_kernels.h"

#define TORCH_GDN_PER_ISA "cpu/simd/rows.h"
#include "cpu/simd/isa_variants.h"

namespace torch_gdn::cpu {

const RowKernels& row_kernels() { return TORCH_GDN_BEST_VARIANT(kRowKernels); }
const NormKernels& norm_kernels() { return TORCH_GDN_BEST_VARIANT(kNormKernels); }

}  // namespace torch_gdn::cpu
