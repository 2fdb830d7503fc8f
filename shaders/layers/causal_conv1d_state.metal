// A threadgroup owns the states of 128 channels of one sequence. Each thread owns one channel. It writes the state at
// the checkpoint, if there is one, and then the last state. The kernel runs after causal_conv1d, which reads the old
// states.
// Layout: x [B, T, D], states [N or slots, D, S], with any strides.
#include "core/checkpoints.h"
#include "layers/convolution_window.h"

template <typename T, typename State>
[[kernel]] void causal_conv1d_state(
    device const T* x [[buffer(0)]],
    device const State* state [[buffer(1)]],
    device const int* state_indices [[buffer(2)]],
    device const uchar* has_initial_state [[buffer(3)]],
    device const int* cu_seqlens [[buffer(4)]],
    device const int* checkpoint_offsets [[buffer(5)]],
    device const int* checkpoint_indices [[buffer(6)]],
    device State* new_state [[buffer(7)]],
    device ErrorLog* errors [[buffer(8)]],
    constant ConvolutionParameters& parameters [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const Sequence sequence = locate_sequence(cu_seqlens, parameters.sequence, int(group.z), 1, lane);
  const Slot slot = locate_slot(state_indices, has_initial_state, parameters.slots, int(group.z), lane);
  const int tokens = sequence.last - sequence.first;
  const bool is_reporter = group.x == 0 && simdgroup == 0 && lane == 0;
  const Checkpoint checkpoint = locate_checkpoint(
      checkpoint_offsets, checkpoint_indices, parameters.checkpoints, state_indices, parameters.slots,
      parameters.sequence, int(group.z), tokens, errors, is_reporter, lane);
  if (is_reporter) report_slot(slot, int(group.z), parameters.sequence.op, errors);
  const int channel = int(group.x) * kConvolutionThreads + int(thread_index);
  if (channel >= parameters.channels || !slot.is_present) return;

  const int64_t first = sequence.batch * parameters.x.batch + sequence.first * parameters.x.token;
  device const T* inputs = x + first + channel * parameters.x.head;
  device const State* before = states_to_read(state, new_state, parameters.slots) + slot.index * parameters.state.slot +
                               channel * parameters.state.channel;
  device State* after = new_state + channel * parameters.new_state.channel;
  const bool has_state = parameters.has_state != 0 && slot.has_state;
  if (checkpoint.tokens > 0) {
    write_state<1>(
        after + checkpoint.index * parameters.new_state.slot, before, inputs, parameters, has_state, parameters.columns,
        checkpoint.tokens - parameters.columns, parameters.columns);
  }
  write_state<1>(
      after + slot.index * parameters.new_state.slot, before, inputs, parameters, has_state, parameters.columns,
      tokens - parameters.columns, parameters.columns);
}
