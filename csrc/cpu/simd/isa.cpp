#include "cpu/simd/isa.h"

#include <ATen/Version.h>

#include <string>

namespace torch_gdn::cpu {

namespace {

Isa find_best_isa() {
#if TORCH_GDN_HAS_X86_ISAS
  const std::string capability = at::get_cpu_capability();
  if (capability == "AVX512") {
    return __builtin_cpu_supports("avx512bf16") ? Isa::kAvx512Bf16 : Isa::kAvx512;
  }
  if (capability == "AVX2") return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

}  // namespace

Isa best_isa() {
  static const Isa best = find_best_isa();
  return best;
}

}  // namespace torch_gdn::cpu
