#include "cpu/convert.h"

#include <algorithm>
#include <cstring>

#include "cpu/common.h"

namespace torch_gdn::cpu {

TORCH_GDN_VECTORISED void widen(const c10::BFloat16* in, int64_t count, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = widened(in[i]);
}

TORCH_GDN_VECTORISED void narrow(const float* in, int64_t count, c10::BFloat16* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i].x = narrowed_to_bfloat16(in[i]);
}

TORCH_GDN_VECTORISED void widen(const c10::Half* in, int64_t count, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = widened(in[i]);
}

TORCH_GDN_VECTORISED void narrow(const float* in, int64_t count, c10::Half* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i].x = narrowed_to_half(in[i]);
}

void widen(const void* in, at::ScalarType dtype, int64_t count, float* out) {
  if (dtype == at::kFloat) {
    std::memcpy(out, in, count * sizeof(float));
  } else if (dtype == at::kBFloat16) {
    widen(static_cast<const c10::BFloat16*>(in), count, out);
  } else {
    widen(static_cast<const c10::Half*>(in), count, out);
  }
}

void narrow(const float* in, int64_t count, at::ScalarType dtype, void* out) {
  if (dtype == at::kFloat) {
    std::memcpy(out, in, count * sizeof(float));
  } else if (dtype == at::kBFloat16) {
    narrow(in, count, static_cast<c10::BFloat16*>(out));
  } else {
    narrow(in, count, static_cast<c10::Half*>(out));
  }
}

void round_to(at::ScalarType dtype, float* x, int64_t count) {
  if (dtype == at::kFloat) return;
  constexpr int64_t kAtOnce = 512;
  uint16_t narrowed[kAtOnce];
  for (int64_t first = 0; first < count; first += kAtOnce) {
    const int64_t length = std::min(kAtOnce, count - first);
    narrow(x + first, length, dtype, narrowed);
    widen(narrowed, dtype, length, x + first);
  }
}

}  // namespace torch_gdn::cpu
