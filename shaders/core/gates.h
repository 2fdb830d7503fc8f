// Reads g and beta of any float dtype, final or raw, and computes the gates. The results are accurate to about 1 ulp
// because the code avoids Metal's exp and log, which may be off by 4 ulp each.
#pragma once
#include <metal_stdlib>

#include "core/elements.h"
#include "core/exponential.h"
#include "core/parameters.h"
using namespace metal;

// log(1 + y) = 2 atanh(s) with s = y / (2 + y), for 0 <= y <= 1. The truncation error is 1e-9.
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

// Computes log(1 + exp(x)). The result equals x from 17 on, so FLA's threshold of 20 needs no branch.
METAL_FUNC float softplus_of(float x) { return max(x, 0.0f) + log_of_one_plus(gate_exp(-fabs(x))); }

METAL_FUNC float sigmoid_of(float x) { return 1.0f / (1.0f + gate_exp(-x)); }

// Passes NaN on.
METAL_FUNC float clamped_log_decay(float g) { return g < kLowestLogDecay ? kLowestLogDecay : g; }

METAL_FUNC float log_decay_from_raw(float x, float A_log) { return -gate_exp(A_log) * softplus_of(x); }

METAL_FUNC uint
gate_bits_at(device const uchar* g, constant GateParameters& gates, int64_t batch, int64_t token, int64_t head) {
  if (gates.g_type == kAbsent) return 0u;
  return read_bits(g, batch * gates.g.batch + token * gates.g.token + head * gates.g.head, gates.g_type);
}

METAL_FUNC float raw_gate_at(
    device const uchar* g, constant GateParameters& gates, int64_t batch, int64_t token, int64_t head) {
  return float_of_bits(gate_bits_at(g, gates, batch, token, head), gates.g_type);
}

// The parameters of a head's gate. They are read once for all tokens.
struct HeadGate {
  float A_log, bias;
  bool is_raw;  // if false, g is the log decay
};

METAL_FUNC HeadGate
head_gate_of(device const uchar* A_log, device const uchar* dt_bias, constant GateParameters& gates, int64_t head) {
  HeadGate gate;
  gate.is_raw = gates.A_log_type != kAbsent;
  gate.A_log = gate.is_raw ? read_float(A_log, head, gates.A_log_type) : 0.0f;
  gate.bias = gate.is_raw && gates.dt_bias_type != kAbsent ? read_float(dt_bias, head, gates.dt_bias_type) : 0.0f;
  return gate;
}

METAL_FUNC float log_decay_of(float raw_gate, HeadGate gate) {
  return gate.is_raw ? log_decay_from_raw(raw_gate + gate.bias, gate.A_log) : raw_gate;
}

METAL_FUNC float log_decay_of_bits(
    uint bits, device const uchar* A_log, device const uchar* dt_bias, constant GateParameters& gates, int64_t head) {
  if (gates.g_type == kAbsent) return 0.0f;
  return log_decay_of(float_of_bits(bits, gates.g_type), head_gate_of(A_log, dt_bias, gates, head));
}

METAL_FUNC float log_decay_at(
    device const uchar* g,
    device const uchar* A_log,
    device const uchar* dt_bias,
    constant GateParameters& gates,
    int64_t batch,
    int64_t token,
    int64_t head) {
  return log_decay_of_bits(gate_bits_at(g, gates, batch, token, head), A_log, dt_bias, gates, head);
}

// Reads beta [B, T, HV], or beta [B, T, HV, V] if a column is given.
METAL_FUNC uint beta_bits_at(
    device const uchar* beta,
    constant GateParameters& gates,
    int64_t batch,
    int64_t token,
    int64_t head,
    int64_t column) {
  if (gates.beta_type == kAbsent) return 0u;
  const int64_t row = batch * gates.beta.batch + token * gates.beta.token + head * gates.beta.head;
  return read_bits(beta, row + column, gates.beta_type);
}

METAL_FUNC float raw_beta_at(
    device const uchar* beta,
    constant GateParameters& gates,
    int64_t batch,
    int64_t token,
    int64_t head,
    int64_t column) {
  return float_of_bits(beta_bits_at(beta, gates, batch, token, head, column), gates.beta_type);
}

METAL_FUNC float beta_of(float raw_beta, constant GateParameters& gates) {
  return gates.beta_scale == 0.0f ? raw_beta : gates.beta_scale * sigmoid_of(raw_beta);
}

METAL_FUNC float beta_of_bits(uint bits, constant GateParameters& gates) {
  if (gates.beta_type == kAbsent) return 1.0f;
  return beta_of(float_of_bits(bits, gates.beta_type), gates);
}

METAL_FUNC float beta_at(
    device const uchar* beta,
    constant GateParameters& gates,
    int64_t batch,
    int64_t token,
    int64_t head,
    int64_t column) {
  return beta_of_bits(beta_bits_at(beta, gates, batch, token, head, column), gates);
}
