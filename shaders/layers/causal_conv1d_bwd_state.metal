// Computes the gradient of the convolution's initial state: what the first W - 1 tokens read of it, and what stays in
// the final state of a short sequence. A threadgroup owns 128 channels of one sequence, one per thread.
// Layout: as in causal_conv1d_bwd; the gradient is contiguous.
#include "layers/convolution_gradient.h"

template <typename T, typename Weight, typename State, int W>
[[kernel]] void causal_conv1d_bwd_state(
    device const T* dy [[buffer(0)]],
    device const T* x [[buffer(1)]],
    device const Weight* weight [[buffer(2)]],
    device const Weight* bias [[buffer(3)]],
    device const State* state [[buffer(4)]],
    device const State* dfinal_state [[buffer(5)]],
    device const int* cu_seqlens [[buffer(6)]],
    device State* dstate [[buffer(7)]],
    constant ConvolutionParameters& parameters [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const Sequence sequence = locate_sequence(cu_seqlens, parameters.sequence, int(group.z), 1, lane);
  const int channel = int(group.x) * kConvolutionThreads + int(thread_index);
  if (channel >= parameters.channels) return;

  const Filter<W, 1> filter = load_filter<W, 1>(weight, bias, parameters, channel);
  device const T* tokens = x + sequence.batch * parameters.x.batch + channel * parameters.x.head;
  device const T* gradients = dy + sequence.batch * parameters.residual.batch + channel * parameters.residual.head;
  device const State* columns = state + int64_t(group.z) * parameters.state.slot + channel * parameters.state.channel;
  device const State* kept =
      dfinal_state + int64_t(group.z) * parameters.new_state.slot + channel * parameters.new_state.channel;
  device State* target = dstate + (int64_t(group.z) * parameters.channels + channel) * parameters.columns;
  Values<1> window[W], sums[W];
  uint taps[W];
  UNROLL for (int tap = 0; tap < W; ++tap) {
    window[tap] =
        tap + 1 < W ? load_history<1>(columns, parameters, true, parameters.columns, tap - (W - 1)) : no_values<1>();
    sums[tap] = no_values<1>();
    taps[tap] = (1u << W) - 1u;
  }
  for (int column = 0; column < parameters.columns; ++column) {
    const int token = column - (parameters.columns - (W - 1));  // the first token but this many
    float gradient = 0.0f;
    if (token >= 0) {
      sums[W - 1] = no_values<1>();
      if (sequence.first + token < sequence.last) {
        window[W - 1] = load_values<1>(tokens + (sequence.first + token) * parameters.x.token);
        const float output_gradient = float(gradients[(sequence.first + token) * parameters.residual.token]);
        sums[W - 1].at[0] = gradient_of_sum<W>(output_gradient, window, filter, taps[0], parameters.has_silu != 0);
      }
      gradient = gradient_of_token<W>(sums, filter, taps);
      move_window<W>(window);
      move_window<W>(sums);
    }
    const int stays = column - (sequence.last - sequence.first);
    if (parameters.has_new_state != 0 && stays >= 0) gradient += float(kept[stays * parameters.new_state.column]);
    target[column] = State(gradient);
  }
}
