// A threadgroup owns the states of 128 channels of one sequence, a thread one channel.
// It runs after causal_conv1d, which reads the states that this overwrites.
// Layout: x [B, T, D], states [N or slots, D, S], with any strides.
#include "layers/convolution_window.h"

template <typename T, typename State>
[[kernel]] void causal_conv1d_state(
    device const T* x [[buffer(0)]],
    device const State* state [[buffer(1)]],
    device const int* state_indices [[buffer(2)]],
    device const uchar* has_initial_state [[buffer(3)]],
    device const int64_t* cu_seqlens [[buffer(4)]],
    device State* new_state [[buffer(5)]],
    device ErrorLog* errors [[buffer(6)]],
    constant ConvolutionParameters& parameters [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const Sequence sequence = locate_sequence(cu_seqlens, parameters.sequence, int(group.z), 1, lane);
  const Slot slot = locate_slot(state_indices, has_initial_state, parameters.slots, int(group.z), lane);
  if (group.x == 0 && simdgroup == 0 && lane == 0) report_slot(slot, errors);
  const int channel = int(group.x) * kConvolutionThreads + int(thread_index);
  if (channel >= parameters.channels || !slot.is_present) return;

  const int tokens = sequence.last - sequence.first;
  const int64_t first = sequence.batch * parameters.x.batch + sequence.first * parameters.x.token;
  write_state<1>(
      new_state + slot.index * parameters.new_state.slot + channel * parameters.new_state.channel,
      state + slot.index * parameters.state.slot + channel * parameters.state.channel,
      x + first + channel * parameters.x.head, parameters, parameters.has_state != 0 && slot.has_state,
      parameters.columns, tokens - parameters.columns, parameters.columns);
}
