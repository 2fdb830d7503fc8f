// Computes the log decay of each key channel from its projection.
// A thread owns one channel of one value head and token.
// Layout: g [B, T, HV, K] with any float dtype and a last stride of 1; A_log [HV], dt_bias [HV, K]; a contiguous
// output.
#include "core/gates.h"
#include "kda/parameters.h"

template <typename Out>
[[kernel]] void fused_kda_gate(
    device const uchar* g [[buffer(0)]],
    device const uchar* A_log [[buffer(1)]],
    device const uchar* dt_bias [[buffer(2)]],
    device Out* log_decays [[buffer(3)]],
    constant KdaGateParameters& parameters [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const int64_t gates = int64_t(parameters.heads) * parameters.channels;  // per token
  const int index = int(group.x) * kKdaGateThreads + int(thread_index);
  if (index >= gates) return;
  const int head = index / parameters.channels, channel = index % parameters.channels;
  const int batch = int(group.y) / parameters.tokens, token = int(group.y) % parameters.tokens;
  constant RowStrides& strides = parameters.gate.g;
  const int64_t row = offset_of(strides, batch, token, head);
  const ChannelGate gate = channel_gate_of(A_log, dt_bias, parameters.gate, head, channel, parameters.channels);
  const float raw = read_float(g, row + channel, parameters.gate.g_type);
  log_decays[int64_t(group.y) * gates + index] = Out(channel_log_decay(raw, gate, parameters.gate));
}
