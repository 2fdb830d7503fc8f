#include "cpu/simd/layer_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <utility>

#include "cpu/simd/aura_kernels.h"
#include "cpu/simd/isa.h"

// Vectors are parameters of functions that are always inlined: no caller sees how they would be passed.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#if TORCH_GDN_HAS_X86_ISAS

TORCH_GDN_BEGIN_ISA("arch=x86-64-v4")
#define TORCH_GDN_SET_WIDTH 512
namespace torch_gdn::cpu::modules_avx512 {
constexpr int kLanes = 16, kLaneBits = 4;
#include "cpu/simd/modules.h"
}  // namespace torch_gdn::cpu::modules_avx512
#undef TORCH_GDN_SET_WIDTH
TORCH_GDN_END_ISA

TORCH_GDN_BEGIN_ISA("arch=x86-64-v3")
#define TORCH_GDN_SET_WIDTH 256
namespace torch_gdn::cpu::modules_avx2 {
constexpr int kLanes = 8, kLaneBits = 3;
#include "cpu/simd/modules.h"
}  // namespace torch_gdn::cpu::modules_avx2
#undef TORCH_GDN_SET_WIDTH
TORCH_GDN_END_ISA

#endif

#define TORCH_GDN_SET_WIDTH 128
namespace torch_gdn::cpu::modules_baseline {
constexpr int kLanes = 4, kLaneBits = 2;
#include "cpu/simd/modules.h"
}  // namespace torch_gdn::cpu::modules_baseline
#undef TORCH_GDN_SET_WIDTH

namespace torch_gdn::cpu {

namespace {

const Isa kIsa = best_isa();

}  // namespace

#if TORCH_GDN_HAS_X86_ISAS
#define TORCH_GDN_CHOOSE(kernel) \
  (kIsa >= Isa::kAvx512 ? modules_avx512::kernel : kIsa == Isa::kAvx2 ? modules_avx2::kernel : modules_baseline::kernel)
#else
#define TORCH_GDN_CHOOSE(kernel) modules_baseline::kernel
#endif

Convolve convolve_kernel(at::ScalarType dtype, bool from_f32, int64_t W, bool silu) {
  return TORCH_GDN_CHOOSE(convolve_kernel)(dtype, from_f32, W, silu);
}

ConvolveStep convolve_step_kernel(at::ScalarType dtype, int64_t S, bool silu) {
  return TORCH_GDN_CHOOSE(convolve_step_kernel)(dtype, S, silu);
}

ReadTransposed read_transposed_kernel(at::ScalarType dtype) { return TORCH_GDN_CHOOSE(read_transposed_kernel)(dtype); }

NormaliseRows normalise_rows_kernel(at::ScalarType x, at::ScalarType gate) {
  return TORCH_GDN_CHOOSE(normalise_rows_kernel)(x, gate);
}

const AuraKernels& aura_kernels() { return TORCH_GDN_CHOOSE(kAuraKernels); }

}  // namespace torch_gdn::cpu
