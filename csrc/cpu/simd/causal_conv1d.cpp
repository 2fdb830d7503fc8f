#include "cpu/simd/layer_kernels.h"

#define TORCH_GDN_PER_ISA "cpu/simd/causal_conv1d.h"
#include "cpu/simd/isa_variants.h"

namespace torch_gdn::cpu {

const ConvolutionKernels& convolution_kernels() { return TORCH_GDN_BEST_VARIANT(kConvolutionKernels); }

}  // namespace torch_gdn::cpu
