// exp and what is made of it, so that a compiler can vectorise them: std::exp is a call for each element.
#pragma once
#include <bit>
#include <cstdint>
#include <limits>

namespace torch_gdn::cpu {

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2, with ln(2) in two parts and the series of exp(r) up to r^7: within 2 ulp.
// Below -87 it is 0: what is lost there is all but denormal.
[[gnu::always_inline]] inline float exponential(float x) {
  const float inside = x > -87.0f ? (x < 88.7f ? x : 88.7f) : -87.0f;
  const float n = (inside * 1.44269504f + 12582912.0f) - 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  const float r = (inside - n * 0.693145752f) - n * 1.42860677e-6f;
  float series = 1.0f / 5040.0f;
  series = series * r + 1.0f / 720.0f;
  series = series * r + 1.0f / 120.0f;
  series = series * r + 1.0f / 24.0f;
  series = series * r + 1.0f / 6.0f;
  series = series * r + 0.5f;
  series = (series * r) * r + r + 1.0f;
  // 2^n in two factors: n may be 128.
  const int32_t half = static_cast<int32_t>(n) >> 1, rest = static_cast<int32_t>(n) - half;
  const float power = std::bit_cast<float>((half + 127) << 23) * series * std::bit_cast<float>((rest + 127) << 23);
  const float bounded = x < -87.0f ? 0.0f : x > 88.72283f ? std::numeric_limits<float>::infinity() : power;
  return x != x ? x : bounded;
}

// log(1 + exp(x)). log(1 + y) for y from 0 to 1 is 2 atanh(s), s = y / (2 + y): the series up to s^15 leaves out 1e-9.
[[gnu::always_inline]] inline float softplus(float x) {
  const float above = x > 0.0f ? x : 0.0f, y = exponential(x > 0.0f ? -x : x);
  const float s = y / (2.0f + y), square = s * s;
  float series = 1.0f / 15.0f;
  series = series * square + 1.0f / 13.0f;
  series = series * square + 1.0f / 11.0f;
  series = series * square + 1.0f / 9.0f;
  series = series * square + 1.0f / 7.0f;
  series = series * square + 1.0f / 5.0f;
  series = series * square + 1.0f / 3.0f;
  return above + (series * square * (2.0f * s) + 2.0f * s);
}

}  // namespace torch_gdn::cpu
