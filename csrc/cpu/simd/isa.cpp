#include "cpu/simd/isa.h"

#if TORCH_GDN_HAS_X86_ISAS
#include <ATen/Version.h>
#include <ATen/cpu/Utils.h>
#include <c10/util/Exception.h>
#include <cpuid.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#elif TORCH_GDN_HAS_ARM_ISAS
#include <cstdlib>
#include <string_view>
#ifdef __APPLE__
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif
#endif

namespace torch_gdn::cpu {

namespace {

#if TORCH_GDN_HAS_X86_ISAS
// g++ 12 has no name for this feature that __builtin_cpu_supports accepts.
bool has_amx_bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & bit_AMX_BF16);
}

bool runs_here(Isa isa) {
  bool runs = true;
  if (isa >= Isa::kAvx2) {
    runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  }
  if (isa >= Isa::kAvx512) {
    runs = runs && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  if (isa >= Isa::kAvx512Bf16) runs = runs && __builtin_cpu_supports("avx512bf16");
  if (isa == Isa::kAmx) runs = runs && has_amx_bf16() && at::cpu::init_amx();
  return runs;
}

// Returns the variant that TORCH_GDN_CPU_ISA names. Tests run each variant with it, also those that are not chosen
// here.
std::optional<Isa> forced_isa() {
  const char* value = std::getenv("TORCH_GDN_CPU_ISA");
  if (value == nullptr || *value == '\0') return std::nullopt;
  std::string known;
  for (const auto& [name, isa] :
       {std::pair{"baseline", Isa::kBaseline}, std::pair{"avx2", Isa::kAvx2}, std::pair{"avx512", Isa::kAvx512},
        std::pair{"avx512_bf16", Isa::kAvx512Bf16}, std::pair{"amx", Isa::kAmx}}) {
    if (!runs_here(isa)) continue;
    if (std::string(value) == name) return isa;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  TORCH_CHECK_VALUE(false, "TORCH_GDN_CPU_ISA: expected one of ", known, " on this processor, got '", value, "'");
}
#elif TORCH_GDN_HAS_ARM_ISAS
bool has_bfmmla() {
#ifdef __APPLE__
  int has = 0;
  size_t size = sizeof(has);
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) == 0 && has != 0;
#else
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16, which older headers do not define
  return (getauxval(AT_HWCAP2) & kBf16) != 0;
#endif
}

// torch has one capability without SVE, and does not report which one was set.
bool is_limited() {
  const char* capability = std::getenv("ATEN_CPU_CAPABILITY");
  return capability != nullptr && std::string_view(capability) == "default";
}
#endif

Isa find_best_isa() {
#if TORCH_GDN_HAS_X86_ISAS
  if (const auto forced = forced_isa()) return *forced;
  const std::string capability = at::get_cpu_capability();
  if (capability == "AVX512") {
    if (!__builtin_cpu_supports("avx512bf16")) return Isa::kAvx512;
    if (has_amx_bf16() && at::cpu::init_amx()) return Isa::kAmx;
    // On one core of a Xeon, 2,048 tokens took 102 ms with vdpbf16ps, and 67 ms with products of f32.
    return __builtin_cpu_is("amd") ? Isa::kAvx512Bf16 : Isa::kAvx512;
  }
  if (capability == "AVX2") return Isa::kAvx2;
#elif TORCH_GDN_HAS_ARM_ISAS
  if (has_bfmmla() && !is_limited()) return Isa::kBfmmla;
#endif
  return Isa::kBaseline;
}

}  // namespace

Isa best_isa() {
  static const Isa best = find_best_isa();
  return best;
}

}  // namespace torch_gdn::cpu
