// Computes exp of a gate to within 1 ulp. Metal's exp may be off by 4 ulp (2.4e-7 to 4.8e-7), and each token multiplies
// the state by it.
#pragma once
#include <metal_stdlib>
using namespace metal;

// Valid for |r| <= ln(2) / 2, with a truncation error of 5e-9.
METAL_FUNC float exp_minus_one_of_a_small(float r) {
  float series = 1.0f / 5040.0f;
  series = fma(series, r, 1.0f / 720.0f);
  series = fma(series, r, 1.0f / 120.0f);
  series = fma(series, r, 1.0f / 24.0f);
  series = fma(series, r, 1.0f / 6.0f);
  series = fma(series, r, 0.5f);
  return fma(series * r, r, r);
}

// exp(x) = 2^n exp(r). ln(2) is split into two parts, so that n times the first part is exact (Cody and Waite).
METAL_FUNC float gate_exp(float x) {
  if (x < -87.0f) return 0.0f;  // below 1.6e-38; the smallest normal number is 1.2e-38
  if (x > 88.0f) return exp(x);
  const float n = rint(x * 1.44269504f);
  const float r = fma(n, -1.42860677e-6f, fma(n, -0.693145752f, x));
  const float series = exp_minus_one_of_a_small(r) + 1.0f;
  return isnan(x) ? x : series * as_type<float>((int(n) + 127) << 23);
}

// Computes S <- exp(g) S, or S <- S + (exp(g) - 1) S if the decay is weak. With the second form, 1000 tokens of
// g = -1e-3 lose 2e-7 instead of 1e-6. For a strong decay, the sum would cancel.
struct Decay {
  float factor;  // exp(g), or exp(g) - 1 if the decay is weak
  bool weak;
};

METAL_FUNC Decay decay_from_log(float g) {
  const bool weak = fabs(g) < 0.34f;
  return {weak ? exp_minus_one_of_a_small(g) : gate_exp(g), weak};
}
