// Between f32, in which the CPU kernels compute, and the dtypes of tensors: loops that every compiler vectorises.
#pragma once
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <bit>
#include <cstdint>

namespace torch_gdn::cpu {

[[gnu::always_inline]] inline float widened(c10::BFloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.x) << 16);
}

// Exponent and digits of a half, moved into place, are those of a float but for a factor of 2^112, denormals too.
[[gnu::always_inline]] inline float widened(c10::Half x) {
  const uint32_t half = x.x, magnitude = (half & 0x7FFF) << 13;
  const auto finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  const uint32_t bits = magnitude >= 0x0F800000 ? magnitude | 0x7F800000 : finite;  // infinity or NaN
  return std::bit_cast<float>(bits | (half & 0x8000) << 16);
}

// To the nearest, ties to even: the bits of a bf16, and of a half, in which a denormal is rounded by an addition that
// leaves its digits at the end of the sum.
[[gnu::always_inline]] inline uint16_t narrowed_to_bfloat16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const auto rounded = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded;
}

[[gnu::always_inline]] inline uint16_t narrowed_to_half(float x) {
  const auto bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7FFFFFFF;
  const uint32_t normal = (magnitude - (112u << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t denormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000;
  uint32_t half = magnitude < 0x38800000 ? denormal : normal;  // 2^-14, the smallest normal half
  half = magnitude >= 0x477FF000 ? 0x7C00 : half;              // 65520, which rounds to infinity
  half = magnitude > 0x7F800000 ? 0x7E00 : half;
  return static_cast<uint16_t>(half | (bits >> 16 & 0x8000));
}

void widen(const c10::BFloat16* in, int64_t count, float* out);
void widen(const c10::Half* in, int64_t count, float* out);
void narrow(const float* in, int64_t count, c10::BFloat16* out);
void narrow(const float* in, int64_t count, c10::Half* out);

// Elements of one of the three dtypes of activations.
void widen(const void* in, at::ScalarType dtype, int64_t count, float* out);
void narrow(const float* in, int64_t count, at::ScalarType dtype, void* out);

// What narrow and widen leave of x.
void round_to(at::ScalarType dtype, float* x, int64_t count);

}  // namespace torch_gdn::cpu
