#include "cpu/simd/gdn_kernels.h"

#include "cpu/common.h"
#include "cpu/convert.h"
#include "cpu/exponential.h"
#include "cpu/simd/isa.h"

#if TORCH_GDN_HAS_X86_ISAS

TORCH_GDN_BEGIN_ISA("arch=x86-64-v4,avx512bf16")
#define TORCH_GDN_ISA_HAS_BF16 1
namespace torch_gdn::cpu::avx512_bf16 {
constexpr int64_t kLanes = 16, kRows = 8, kVectors = 2;
#include "cpu/simd/all.h"
}  // namespace torch_gdn::cpu::avx512_bf16
#undef TORCH_GDN_ISA_HAS_BF16
TORCH_GDN_END_ISA
#define TORCH_GDN_ISA_HAS_BF16 0

TORCH_GDN_BEGIN_ISA("arch=x86-64-v4")
namespace torch_gdn::cpu::avx512 {
constexpr int64_t kLanes = 16, kRows = 8, kVectors = 2;
#include "cpu/simd/all.h"
}  // namespace torch_gdn::cpu::avx512
TORCH_GDN_END_ISA

TORCH_GDN_BEGIN_ISA("arch=x86-64-v3")
namespace torch_gdn::cpu::avx2 {
constexpr int64_t kLanes = 8, kRows = 4, kVectors = 2;
#include "cpu/simd/all.h"
}  // namespace torch_gdn::cpu::avx2
TORCH_GDN_END_ISA

#else
#define TORCH_GDN_ISA_HAS_BF16 0
#endif

// What every processor of its kind has: 16 registers on x86-64, 32 on arm64.
namespace torch_gdn::cpu::baseline {
#if defined(__x86_64__)
constexpr int64_t kLanes = 4, kRows = 4, kVectors = 2;
#else
constexpr int64_t kLanes = 4, kRows = 8, kVectors = 2;
#endif
#include "cpu/simd/all.h"
}  // namespace torch_gdn::cpu::baseline

namespace torch_gdn::cpu {

namespace {

const Isa kIsa = best_isa();

}  // namespace

const ChunkKernels<float>& chunk_kernels() {
#if TORCH_GDN_HAS_X86_ISAS
  if (kIsa >= Isa::kAvx512) return avx512::kChunkKernels<float>;
  if (kIsa == Isa::kAvx2) return avx2::kChunkKernels<float>;
#endif
  return baseline::kChunkKernels<float>;
}

const ChunkKernels<Pair>* chunk_kernels_of_pairs() {
#if TORCH_GDN_HAS_X86_ISAS
  if (kIsa == Isa::kAvx512Bf16) return &avx512_bf16::kChunkKernels<Pair>;
#endif
  return nullptr;
}

const RecurrentKernels& recurrent_kernels() {
#if TORCH_GDN_HAS_X86_ISAS
  if (kIsa >= Isa::kAvx512) return avx512::kRecurrentKernels;
  if (kIsa == Isa::kAvx2) return avx2::kRecurrentKernels;
#endif
  return baseline::kRecurrentKernels;
}

}  // namespace torch_gdn::cpu
