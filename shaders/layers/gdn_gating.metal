// Computes g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), or twice that. A thread owns one token and
// value head.
// Layout: a and b [B, T, HV] with any strides and float dtype; A_log and dt_bias [HV]; g and beta [B, T, HV], f32.
#include "core/gates.h"
#include "core/rows.h"
#include "layers/gdn_gating.h"

template <int Threads>
[[kernel]] void gdn_gating(
    device const uchar* a [[buffer(0)]],
    device const uchar* b [[buffer(1)]],
    device const uchar* A_log [[buffer(2)]],
    device const uchar* dt_bias [[buffer(3)]],
    device float* g [[buffer(4)]],
    device float* beta [[buffer(5)]],
    constant GdnGatingParameters& parameters [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  static_assert(Threads % 32 == 0, "whole simdgroups");
  const RowIndex at =
      row_index(int64_t(group.x) * Threads + thread_index, parameters.count, parameters.tokens, parameters.heads);
  if (!at.is_present) return;
  const uint bits = gate_bits_at(a, parameters.gates, at.batch, at.token, at.head);
  g[at.row] = log_decay_of_bits(bits, A_log, dt_bias, parameters.gates, at.head);
  beta[at.row] = beta_at(b, parameters.gates, at.batch, at.token, at.head);
}
