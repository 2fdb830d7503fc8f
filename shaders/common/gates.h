// Gates and steps as models hand them over: of any float dtype, done, or raw. Within about 1 ulp whatever Metal's own
// exp and log do (4 ulp each are allowed to them), since a state is multiplied by exp(g) at each token.
#pragma once
#include <metal_stdlib>

#include "common/exponential.h"
#include "gdn/parameters.h"
using namespace metal;

METAL_FUNC float read_float(device const uchar* values, int64_t index, int type) {
  if (type == kFloat32) return ((device const float*)values)[index];
  if (type == kFloat16) return float(((device const half*)values)[index]);
  return float(((device const bfloat*)values)[index]);
}

// log(1 + y) for y from 0 to 1 is 2 atanh(s), s = y / (2 + y) <= 1/3: the series up to s^15 leaves out 1e-9 of it.
METAL_FUNC float log_of_one_plus(float y) {
  const float s = y / (2.0f + y);
  const float square = s * s;
  float series = 1.0f / 15.0f;
  series = fma(series, square, 1.0f / 13.0f);
  series = fma(series, square, 1.0f / 11.0f);
  series = fma(series, square, 1.0f / 9.0f);
  series = fma(series, square, 1.0f / 7.0f);
  series = fma(series, square, 1.0f / 5.0f);
  series = fma(series, square, 1.0f / 3.0f);
  return fma(series * square, 2.0f * s, 2.0f * s);
}

// log(1 + exp(x)), which is x to the last digit from 17 on: FLA's threshold of 20 needs no case of its own.
METAL_FUNC float softplus_of(float x) { return max(x, 0.0f) + log_of_one_plus(gate_exp(-fabs(x))); }

METAL_FUNC float sigmoid_of(float x) { return 1.0f / (1.0f + gate_exp(-x)); }

METAL_FUNC float gate_of(float x, float A_log) { return -gate_exp(A_log) * softplus_of(x); }

// The log decay of a token and head.
METAL_FUNC float gate_at(
    device const uchar* g,
    device const uchar* A_log,
    device const uchar* dt_bias,
    constant GateParameters& gates,
    int64_t batch,
    int64_t token,
    int64_t head) {
  if (gates.g_type == kAbsent) return 0.0f;
  const float gate = read_float(g, batch * gates.g.batch + token * gates.g.token + head * gates.g.head, gates.g_type);
  if (gates.A_log_type == kAbsent) return gate;
  const float bias = gates.dt_bias_type == kAbsent ? 0.0f : read_float(dt_bias, head, gates.dt_bias_type);
  return gate_of(gate + bias, read_float(A_log, head, gates.A_log_type));
}

// The step of a token and head, or of one of its columns.
METAL_FUNC float step_at(
    device const uchar* beta,
    constant GateParameters& gates,
    int64_t batch,
    int64_t token,
    int64_t head,
    int64_t column) {
  if (gates.beta_type == kAbsent) return 1.0f;
  const int64_t row = batch * gates.beta.batch + token * gates.beta.token + head * gates.beta.head;
  const float step = read_float(beta, row + column, gates.beta_type);
  return gates.largest_step == 0.0f ? step : gates.largest_step * sigmoid_of(step);
}
