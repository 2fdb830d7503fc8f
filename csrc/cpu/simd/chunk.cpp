#include "cpu/simd/gdn_kernels.h"

#define TORCH_GDN_HAS_BF16_VARIANTS
#define TORCH_GDN_PER_ISA "cpu/simd/chunk.h"
#include "cpu/simd/isa_variants.h"

namespace torch_gdn::cpu {

const ChunkKernels<float>& chunk_kernels() { return TORCH_GDN_BEST_VARIANT(kChunkKernels<float>); }

const ChunkKernels<Pair>* chunk_kernels_of_pairs() {
#if TORCH_GDN_HAS_X86_ISAS
  if (best_isa() == Isa::kAmx) return &amx::kChunkKernels<Pair>;
  if (best_isa() == Isa::kAvx512Bf16) return &avx512_bf16::kChunkKernels<Pair>;
#elif TORCH_GDN_HAS_ARM_ISAS
  if (best_isa() == Isa::kBfmmla) return &bfmmla::kChunkKernels<Pair>;
#endif
  return nullptr;
}

}  // namespace torch_gdn::cpu
