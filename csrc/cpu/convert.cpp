#include "convert.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "common.h"

namespace torch_gdn::cpu {

TORCH_GDN_VECTORISED void widen(const c10::BFloat16* in, int64_t count, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = std::bit_cast<float>(static_cast<uint32_t>(in[i].x) << 16);
}

TORCH_GDN_VECTORISED void narrow(const float* in, int64_t count, c10::BFloat16* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(in[i]);
    const auto rounded = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    out[i].x = (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded;
  }
}

// Exponent and digits of a half, moved into place, are those of a float but for a factor of 2^112, denormals too.
TORCH_GDN_VECTORISED void widen(const c10::Half* in, int64_t count, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t half = in[i].x, magnitude = (half & 0x7FFF) << 13;
    const auto finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
    const uint32_t bits = magnitude >= 0x0F800000 ? magnitude | 0x7F800000 : finite;  // infinity or NaN
    out[i] = std::bit_cast<float>(bits | (half & 0x8000) << 16);
  }
}

// To the nearest, ties to even. A denormal is rounded by an addition that leaves its digits at the end of the sum.
TORCH_GDN_VECTORISED void narrow(const float* in, int64_t count, c10::Half* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(in[i]), magnitude = bits & 0x7FFFFFFF;
    const uint32_t normal = (magnitude - (112u << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    const uint32_t denormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000;
    uint32_t half = magnitude < 0x38800000 ? denormal : normal;  // 2^-14, the smallest normal half
    half = magnitude >= 0x477FF000 ? 0x7C00 : half;              // 65520, which rounds to infinity
    half = magnitude > 0x7F800000 ? 0x7E00 : half;
    out[i].x = static_cast<uint16_t>(half | (bits >> 16 & 0x8000));
  }
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
