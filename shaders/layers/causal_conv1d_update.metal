// The kernel for few tokens. A threadgroup owns 128 channels of one sequence. Each thread processes all tokens of one
// channel, then its state. If the W - 1 columns of all channels' states are neighbours, a simdgroup moves them together
// as whole cache lines. A state that keeps each token holds the W - 2 columns before the first token, then the tokens.
// If `a` of them were accepted, the next step's history starts at column a - 1.
// Registers: the last W tokens and the weights of a thread's channel, in f32.
// Layout: x [B, T, D] with any strides and its channels in order or grouped by key head; y with row strides; weight
// [D, W]; states [N or slots, D, S] with any strides.
#include "layers/convolution_window.h"

// Returns the position of a channel in x.
METAL_FUNC int64_t place_of(int channel, ChannelOrder order) {
  if (order.keys == 0) return channel;
  const int value_channel = channel - order.all_keys - order.all_keys;
  const int key_channel = channel % order.all_keys;
  const int64_t group = value_channel >= 0 ? value_channel / order.values : key_channel / order.keys;
  const int first = value_channel >= 0 ? order.keys + order.keys : channel < order.all_keys ? 0 : order.keys;
  const int within = value_channel >= 0 ? value_channel % order.values : key_channel % order.keys;
  const int width = order.keys + order.values;  // half the channels of a group
  return group * width * 2 + first + within;
}

// Moves the W - 1 columns per channel that the window holds. Channels have no gaps between them.
template <int W>
METAL_FUNC bool states_are_neighbours(constant ConvolutionParameters& parameters) {
  const bool before = parameters.state.column == 1 && parameters.state.channel == W - 1;
  const bool after = parameters.new_state.column == 1 && parameters.new_state.channel == W - 1;
  return W > 2 && parameters.columns == W - 1 && parameters.keeps_each == 0 && (before || parameters.has_state == 0) &&
         after;
}

template <typename T, typename Weight, typename State, int W>
[[kernel]] void causal_conv1d_update(
    device const T* x [[buffer(0)]],
    device const Weight* weight [[buffer(1)]],
    device const Weight* bias [[buffer(2)]],
    device const State* state [[buffer(3)]],
    device const int* state_indices [[buffer(4)]],
    device const uchar* has_initial_state [[buffer(5)]],
    device const int* num_accepted_tokens [[buffer(6)]],
    device const int* cu_seqlens [[buffer(7)]],
    device const T* residual [[buffer(8)]],
    device T* y [[buffer(9)]],
    device State* new_state [[buffer(10)]],
    device ErrorLog* errors [[buffer(11)]],
    constant ConvolutionParameters& parameters [[buffer(12)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const Sequence sequence = locate_sequence(cu_seqlens, parameters.sequence, int(group.z), 1, lane);
  const Slot slot = locate_slot(state_indices, has_initial_state, parameters.slots, int(group.z), lane);
  const int count = sequence.last - sequence.first;
  const int most = parameters.columns - (W - 2);  // the most tokens that a state keeps
  const AcceptedCount accepted = accepted_count(num_accepted_tokens, parameters.slots, int(group.z), most);
  if (group.x == 0 && simdgroup == 0) {
    if (group.z == 0) report_cu_seqlens(cu_seqlens, parameters.sequence, 0, errors, lane);
    if (lane == 0) {
      report_slot(slot, int(group.z), parameters.sequence.op, errors);
      report_accepted(accepted, num_accepted_tokens, parameters.slots, int(group.z), parameters.sequence.op, errors);
      if (parameters.keeps_each != 0 && count > most) {
        report_error(
            errors, parameters.sequence.op,
            "state_pool: expected W - 2 columns plus one per token of a sequence, got too few for ", count,
            int(group.z), __LINE__);
      }
    }
  }
  const int channel = int(group.x) * kConvolutionThreads + int(thread_index);
  const bool is_inside = channel < parameters.channels;
  const int first_channel = channel - int(lane);  // first channel of the simdgroup
  const int neighbours = (parameters.channels - first_channel) * (W - 1);

  const int64_t first = sequence.batch * parameters.x.batch + sequence.first * parameters.x.token;
  device const T* tokens = x + first + place_of(channel, parameters.order) * parameters.x.head;
  device const State* states = states_to_read(state, new_state, parameters.slots) + slot.index * parameters.state.slot;
  device const State* columns = states + channel * parameters.state.channel;
  device const T* added = residual + sequence.batch * parameters.residual.batch +
                          sequence.first * parameters.residual.token + channel * parameters.residual.head;
  device T* output = y + sequence.batch * parameters.y_batch + sequence.first * parameters.y_token + channel;
  if (!slot.is_present) {  // the sequence pads the batch: its outputs are zeros, and none of its tokens is read
    for (int token = 0; token < count && is_inside; ++token) {
      store_values(output + token * parameters.y_token, no_values<1>());
    }
    return;
  }
  const Filter<W, 1> filter = load_filter<W, 1>(weight, bias, parameters, min(channel, parameters.channels - 1));
  const bool has_state = parameters.has_state != 0 && slot.has_state;
  const int end = parameters.keeps_each != 0 ? accepted.tokens + W - 2 : parameters.columns;
  const bool together = states_are_neighbours<W>(parameters);
  Values<1> window[W];
  UNROLL for (int tap = 0; tap < W; ++tap) window[tap] = no_values<1>();
  if (together) {
    if (has_state) load_neighbours<W - 1>(states + int64_t(first_channel) * (W - 1), neighbours, int(lane), window + 1);
  } else if (is_inside && W == 4 && parameters.has_column_vectors != 0) {
    const Values<4> all = has_state ? load_values<4>(columns) : no_values<4>();
    UNROLL for (int tap = 0; tap < W; ++tap) window[tap].at[0] = all.at[tap];
  } else if (is_inside) {  // no tap reads the oldest column
    UNROLL for (int tap = 1; tap < W; ++tap) {
      window[tap] = load_history<1>(columns, parameters, has_state, end, tap - W);
    }
  }
  for (int token = 0; token < count && is_inside; ++token) {
    move_window<W>(window);
    window[W - 1] = load_values<1>(tokens + token * parameters.x.token);
    Values<1> result = convolve<W, 1>(window, filter, parameters.has_silu != 0);
    add_residual<1>(result, added + token * parameters.residual.token, parameters);
    store_values(output + token * parameters.y_token, result);
  }
  device State* new_states = new_state + slot.index * parameters.new_state.slot;
  device State* target = new_states + channel * parameters.new_state.channel;
  if (together) {
    store_neighbours<W - 1>(new_states + int64_t(first_channel) * (W - 1), neighbours, int(lane), window + 1);
  } else if (!is_inside) {
    return;
  } else if (W == 4 && parameters.has_column_vectors != 0) {
    Values<4> history;
    UNROLL for (int tap = 0; tap < W; ++tap) history.at[tap] = window[tap].at[0];
    store_values(target, history);
  } else if (parameters.keeps_each != 0) {
    const int kept = count > 0 ? min(W - 2 + count, parameters.columns) : 0;
    write_state<1>(target, columns, tokens, parameters, has_state, end, 2 - W, kept);
  } else {
    write_state<1>(target, columns, tokens, parameters, has_state, end, count - parameters.columns, parameters.columns);
  }
}
