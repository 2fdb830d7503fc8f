// Computes the gradients of the log decay y of each key channel, with x = g + dt_bias and rate = exp(A_log):
//     dg = -dy * rate * sigmoid(x)   dA_log = sum of dy * y   ddt_bias = sum of dg
// or, for y = lower_bound * s with s = sigmoid(rate * x), dg = dy * lower_bound * s * (1 - s) * rate and
// dA_log = sum of dg * x.
// A thread owns one channel of one value head, and some tokens. Their sums go to partials [groups of tokens, HV, K],
// which sum_partials adds up.
// Layout: g and dy [B, T, HV, K] with a last stride of 1; A_log [HV], dt_bias [HV, K]; a contiguous dg.
#include "core/gates.h"
#include "kda/parameters.h"

template <typename Dy, typename T>
[[kernel]] void fused_kda_gate_bwd(
    device const Dy* dy [[buffer(0)]],
    device const T* g [[buffer(1)]],
    device const uchar* A_log [[buffer(2)]],
    device const uchar* dt_bias [[buffer(3)]],
    device T* dg [[buffer(4)]],
    device float* dA_log_partials [[buffer(5)]],
    device float* dbias_partials [[buffer(6)]],
    constant KdaGateBwdParameters& parameters [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const int64_t gates = int64_t(parameters.heads) * parameters.channels;  // per token
  const int index = int(group.x) * kKdaGateBwdThreads + int(thread_index);
  if (index >= gates) return;
  const int head = index / parameters.channels, channel = index % parameters.channels;
  const ChannelGate gate = channel_gate_of(A_log, dt_bias, parameters.gate, head, channel, parameters.channels);
  constant RowStrides &g_strides = parameters.gate.g, &dy_strides = parameters.dy;
  const int64_t all = parameters.all_tokens;
  const int first = int(min(int64_t(group.y) * parameters.tokens_of_group, all));
  const int last = int(min(int64_t(first) + parameters.tokens_of_group, all));
  float dA_log = 0.0f, dbias = 0.0f;
  for (int at = first; at < last; ++at) {
    const int batch = at / parameters.tokens, token = at % parameters.tokens;
    const float x = float(g[offset_of(g_strides, batch, token, head) + channel]) + gate.bias;
    const float gradient = float(dy[offset_of(dy_strides, batch, token, head) + channel]);
    float dx;
    if (parameters.gate.kind == kBoundedGate) {
      const float small = sigmoid_of(-fabs(gate.rate * x));
      dx = gradient * parameters.gate.lower_bound * (small * (1.0f - small)) * gate.rate;
      dA_log += dx * x;
    } else {
      dx = -gradient * gate.rate * sigmoid_of(x);
      dA_log -= gradient * gate.rate * softplus_of(x);
    }
    dbias += dx;
    dg[at * gates + index] = T(dx);
  }
  if (parameters.gate.A_log_type != kAbsent) dA_log_partials[group.y * gates + index] = dA_log;
  if (parameters.gate.dt_bias_type != kAbsent) dbias_partials[group.y * gates + index] = dbias;
}
