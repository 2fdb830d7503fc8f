// Computes the gradients of the causal convolution with respect to x, the weight and the bias. A threadgroup owns 128
// tokens of one sequence and 128 channels, one per thread. A thread walks over its tokens and the W - 1 after them:
// when it knows the gradients dz of the sums up to token t, token t - (W - 1) has all of its gradient. Registers: the
// last W tokens, dz of the last W tokens, the weights and their gradients, in f32. Layout: x and dy [B, T, D] with any
// strides, dx contiguous; weight [D, W]; states [N, D, S] with any strides. The parameters name dy the residual, and
// the gradient of the final state the new state. The gradients of the parameters go to partials [chunks, D, W] and
// [chunks, D], which sum_partials adds up.
#include "layers/convolution.h"
#include "layers/convolution_gradient.h"

template <typename T, typename Weight, typename State, int W>
[[kernel]] void causal_conv1d_bwd(
    device const T* dy [[buffer(0)]],
    device const T* x [[buffer(1)]],
    device const Weight* weight [[buffer(2)]],
    device const Weight* bias [[buffer(3)]],
    device const State* state [[buffer(4)]],
    device const State* dfinal_state [[buffer(5)]],
    device const int* cu_seqlens [[buffer(6)]],
    device const int* seq_idx [[buffer(7)]],
    device T* dx [[buffer(8)]],
    device float* dweight_partials [[buffer(9)]],
    device float* dbias_partials [[buffer(10)]],
    device ErrorLog* errors [[buffer(11)]],
    constant ConvolutionParameters& parameters [[buffer(12)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const Chunk chunk = locate_own_chunk(
      cu_seqlens, parameters.sequence, uint3(group.y, group.x, group.z), kConvolutionBwdTokens, errors, simdgroup,
      lane);
  const int end = parameters.sequence.boundary_bytes != 0
                      ? clamped_boundary(cu_seqlens, parameters.sequence, chunk.sequence + 1)
                      : parameters.sequence.tokens;  // of the chunk's sequence, or of the first one without a chunk
  const int channel = int(group.x) * kConvolutionThreads + int(thread_index);
  if (channel >= parameters.channels) return;

  const Filter<W, 1> filter = load_filter<W, 1>(weight, bias, parameters, channel);
  device const T* tokens = x + chunk.batch * parameters.x.batch + channel * parameters.x.head;
  device const T* gradients = dy + chunk.batch * parameters.residual.batch + channel * parameters.residual.head;
  device const State* columns = state + chunk.sequence * parameters.state.slot + channel * parameters.state.channel;
  device const State* kept =
      dfinal_state + chunk.sequence * parameters.new_state.slot + channel * parameters.new_state.channel;
  device T* output = dx + chunk.batch * parameters.y_batch + channel;
  Values<1> window[W], sums[W], dweight[W];
  uint taps[W];
  UNROLL for (int tap = 0; tap < W; ++tap) {
    window[tap] = sums[tap] = dweight[tap] = no_values<1>();
    taps[tap] = 0u;
    const int position = chunk.offset - (W - 1) + tap;
    if (tap + 1 < W && chunk.tokens > 0) {
      window[tap] = position < 0
                        ? load_history<1>(columns, parameters, parameters.has_state != 0, parameters.columns, position)
                        : load_values<1>(tokens + (chunk.first - (W - 1) + tap) * parameters.x.token);
    }
  }
  float dbias = 0.0f;
  const int last = chunk.first + chunk.tokens;
  const bool has_silu = parameters.has_silu != 0;
  for (int token = chunk.first; token < last + W - 1 && chunk.tokens > 0; ++token) {
    sums[W - 1] = no_values<1>();
    taps[W - 1] = 0u;
    if (token < end) {
      window[W - 1] = load_values<1>(tokens + token * parameters.x.token);
      taps[W - 1] = taps_of<W>(seq_idx, parameters, chunk.batch, token);
      const float output_gradient = float(gradients[token * parameters.residual.token]);
      sums[W - 1].at[0] = gradient_of_sum<W>(output_gradient, window, filter, taps[W - 1], has_silu);
    }
    if (token < last) {
      dbias += sums[W - 1].at[0];
      UNROLL for (int tap = 0; tap < W; ++tap) {
        if ((taps[W - 1] >> tap & 1u) != 0u) dweight[tap].at[0] += sums[W - 1].at[0] * window[tap].at[0];
      }
    }
    const int done = token - (W - 1);
    if (done >= chunk.first) {
      float gradient = gradient_of_token<W>(sums, filter, taps);
      const int column = done - (end - parameters.columns);
      if (parameters.has_new_state != 0 && column >= 0) gradient += float(kept[column * parameters.new_state.column]);
      output[done * parameters.y_token] = T(gradient);
    }
    move_window<W>(window);
    move_window<W>(sums);
    move_window<W>(taps);
  }
  if (parameters.has_partials == 0) return;
  const int64_t at = chunk.row * parameters.channels + channel;
  UNROLL for (int tap = 0; tap < W; ++tap) dweight_partials[at * W + tap] = dweight[tap].at[0];
  if (parameters.has_bias != 0) dbias_partials[at] = dbias;
}
