// The ISA variants for which the kernels of this folder are compiled, and the choice among them. One library has all
// variants.
#pragma once

#if defined(__x86_64__) && defined(__linux__)
#define TORCH_GDN_HAS_X86_ISAS 1
#else
#define TORCH_GDN_HAS_X86_ISAS 0
#endif
#if defined(__aarch64__)
#define TORCH_GDN_HAS_ARM_ISAS 1
#else
#define TORCH_GDN_HAS_ARM_ISAS 0
#endif

namespace torch_gdn::cpu {

#if TORCH_GDN_HAS_ARM_ISAS
enum class Isa { kBaseline, kBfmmla };
#else
enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16, kAmx };  // each variant includes the previous ones
#endif

// Chooses as torch does. ATEN_CPU_CAPABILITY, which limits torch, therefore also limits these kernels.
Isa best_isa();

#if TORCH_GDN_HAS_X86_ISAS
template <typename Kernels>
const Kernels& best_variant(const Kernels& baseline, const Kernels& avx2, const Kernels& avx512) {
  const Isa isa = best_isa();
  return isa >= Isa::kAvx512 ? avx512 : isa == Isa::kAvx2 ? avx2 : baseline;
}
#endif

}  // namespace torch_gdn::cpu

// Returns a table of kernels in the best variant for this machine. Each ISA variant has a table of this name.
#if TORCH_GDN_HAS_X86_ISAS
#define TORCH_GDN_BEST_VARIANT(kernels) best_variant(baseline::kernels, avx2::kernels, avx512::kernels)
#else
#define TORCH_GDN_BEST_VARIANT(kernels) (baseline::kernels)
#endif
