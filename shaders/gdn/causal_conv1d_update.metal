// One threadgroup owns 128 packets of channels of one sequence, for few tokens; a thread owns a packet for all of them
// and then writes its state. In registers: the last W tokens and the weights of a thread's channels, in f32.
// Layout: x [B, T, D] with any strides, y the same, contiguous; weight [D, W]; states [N or slots, D, S], any strides.
#include "gdn/causal_conv1d.h"

template <typename T, typename P, typename S, int W, int Packet>
[[kernel]] void causal_conv1d_update(
    device const T* x [[buffer(0)]],
    device const P* weight [[buffer(1)]],
    device const P* bias [[buffer(2)]],
    device const S* state [[buffer(3)]],
    device const int* state_indices [[buffer(4)]],
    device const uchar* has_initial_state [[buffer(5)]],
    device const int64_t* bounds [[buffer(6)]],
    device T* y [[buffer(7)]],
    device S* new_state [[buffer(8)]],
    device ErrorLog* errors [[buffer(9)]],
    constant ConvolutionParameters& parameters [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const Sequence sequence = locate_sequence(bounds, parameters.sequence, int(group.z), 1, lane);
  const Slot slot = locate_slot(state_indices, has_initial_state, parameters.slots, int(group.z), lane);
  if (group.x == 0 && simdgroup == 0) {
    if (group.z == 0) report_bounds(bounds, parameters.sequence, 0, errors, lane);
    if (lane == 0) report_slot(slot, errors);
  }
  const int channel = (int(group.x) * kConvolutionThreads + int(thread_index)) * Packet;
  if (channel >= parameters.channels) return;

  const int64_t first = sequence.batch * parameters.x.batch + sequence.first * parameters.x.token;
  device const T* tokens = x + first + channel * parameters.x.head;
  device const S* columns = state + slot.index * parameters.state.slot + channel * parameters.state.channel;
  device T* output = y + (int64_t(sequence.batch) * parameters.sequence.tokens + sequence.first) * parameters.channels;
  const Filter<W, Packet> filter = load_filter<W, Packet>(weight, bias, parameters, channel);
  const bool has_state = parameters.has_state != 0 && slot.has_state && slot.is_present;
  const int count = sequence.last - sequence.first;
  Values<Packet> window[W];
  UNROLL for (int tap = 0; tap + 1 < W; ++tap) {
    window[tap] = load_history<Packet>(columns, parameters, has_state, tap - (W - 1));
  }
  for (int token = 0; token < count; ++token) {
    window[W - 1] = load_values<Packet>(tokens + token * parameters.x.token);
    Values<Packet> result = convolve<W, Packet>(window, filter, parameters.has_silu != 0);
    if (!slot.is_present) result = no_values<Packet>();
    store_values(output + int64_t(token) * parameters.channels + channel, result);
    move_window<W, Packet>(window);
  }
  if (slot.is_present) {
    write_state<Packet>(
        new_state + slot.index * parameters.new_state.slot + channel * parameters.new_state.channel, columns, tokens,
        parameters, has_state, count);
  }
}
