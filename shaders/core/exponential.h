// exp of a gate. A state keeps f32 for a whole sequence, and is multiplied by it at each token: Metal's own exp may be
// off by 4 ulp (its specification's table), 2.4e-7 to 4.8e-7 after one token; this one stays within 1 ulp.
#pragma once
#include <metal_stdlib>
using namespace metal;

// For |r| <= ln(2) / 2: the series up to r^7; 5e-9 is left out.
METAL_FUNC float exp_minus_one_of_a_small(float r) {
  float series = 1.0f / 5040.0f;
  series = fma(series, r, 1.0f / 720.0f);
  series = fma(series, r, 1.0f / 120.0f);
  series = fma(series, r, 1.0f / 24.0f);
  series = fma(series, r, 1.0f / 6.0f);
  series = fma(series, r, 0.5f);
  return fma(series * r, r, r);
}

// exp(x) = 2^n exp(r), with ln(2) in two parts: n times the first is exact.
METAL_FUNC float gate_exp(float x) {
  if (x < -87.0f) return 0.0f;  // 1.6e-38, all but the smallest normal number
  if (x > 88.0f) return exp(x);
  const float n = rint(x * 1.44269504f);
  const float r = fma(n, -1.42860677e-6f, fma(n, -0.693145752f, x));
  const float series = exp_minus_one_of_a_small(r) + 1.0f;
  return isnan(x) ? x : series * as_type<float>((int(n) + 127) << 23);
}

// The decay of one token. Over a thousand tokens with g = -1e-3 the rounding of exp(g), the same each time, adds up to
// 1e-6; a weak decay is therefore subtracted, as exp(g) - 1, which leaves 2e-7. A strong one must not be: it cancels.
struct Decay {
  float factor;  // exp(g), or exp(g) - 1 of a weak one
  bool weak;
};

METAL_FUNC Decay decay_of(float g) {
  Decay decay;
  decay.weak = fabs(g) < 0.34f;
  decay.factor = decay.weak ? exp_minus_one_of_a_small(g) : gate_exp(g);
  return decay;
}
