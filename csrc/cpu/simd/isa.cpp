#include "cpu/simd/isa.h"

#include <ATen/Version.h>

#include <string>

namespace torch_gdn::cpu {

InstructionSet best_instruction_set() {
#if TORCH_GDN_HAS_X86_SETS
  const std::string capability = at::get_cpu_capability();
  if (capability == "AVX512") {
    return __builtin_cpu_supports("avx512bf16") ? InstructionSet::kAvx512Bf16 : InstructionSet::kAvx512;
  }
  if (capability == "AVX2") return InstructionSet::kAvx2;
#endif
  return InstructionSet::kBaseline;
}

}  // namespace torch_gdn::cpu
