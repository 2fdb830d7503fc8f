#include "cpu/simd/gdn_kernels.h"

#define TORCH_GDN_PER_ISA "cpu/simd/chunk_channels.h"
#include "cpu/simd/isa_variants.h"

namespace torch_gdn::cpu {

const ChannelKernels& channel_kernels() { return TORCH_GDN_BEST_VARIANT(kChannelKernels); }

}  // namespace torch_gdn::cpu
