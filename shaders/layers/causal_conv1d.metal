// A threadgroup owns 32 tokens of one sequence and 128 vectors of channels. Each thread owns one of the vectors. The
// lanes of a simdgroup load the weights of its channels together, as whole cache lines.
// Registers: the last W tokens and the weights of a thread's channels, in f32.
// Layout: x [B, T, D] with any strides, y with row strides; weight [D, W]; states [N or slots, D, S] with any strides.
#include "layers/convolution.h"
#include "layers/convolution_window.h"

template <typename T, typename Weight, typename State, int W, int Width>
[[kernel]] void causal_conv1d(
    device const T* x [[buffer(0)]],
    device const Weight* weight [[buffer(1)]],
    device const Weight* bias [[buffer(2)]],
    device const State* state [[buffer(3)]],
    device const int* state_indices [[buffer(4)]],
    device const uchar* has_initial_state [[buffer(5)]],
    device const int* cu_seqlens [[buffer(6)]],
    device const int* seq_idx [[buffer(7)]],
    device const T* residual [[buffer(8)]],
    device T* y [[buffer(9)]],
    device ErrorLog* errors [[buffer(10)]],
    constant ConvolutionParameters& parameters [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const Chunk chunk = locate_own_chunk(
      cu_seqlens, parameters.sequence, uint3(group.y, group.x, group.z), kConvolutionTokens, errors, simdgroup, lane);
  const Slot slot = locate_slot(state_indices, has_initial_state, parameters.slots, chunk.sequence, lane);
  const int channel = int(group.x) * (kConvolutionThreads * Width) + int(thread_index) * Width;
  if (chunk.tokens == 0) return;
  const Filter<W, Width> filter = load_filter_together<W, Width>(weight, bias, parameters, channel, int(lane));
  if (channel >= parameters.channels) return;

  device const T* tokens = x + chunk.batch * parameters.x.batch + channel * parameters.x.head;
  device const State* columns = state + slot.index * parameters.state.slot + channel * parameters.state.channel;
  device const T* added = residual + chunk.batch * parameters.residual.batch + channel * parameters.residual.head;
  device T* output = y + chunk.batch * parameters.y_batch + channel;
  const bool has_state = parameters.has_state != 0 && slot.has_state && slot.is_present;
  Values<Width> window[W];
  UNROLL for (int tap = 0; tap + 1 < W; ++tap) {
    const int position = chunk.offset - (W - 1) + tap;
    if (position < 0) {
      window[tap] = load_history<Width>(columns, parameters, has_state, parameters.columns, position);
    } else {
      window[tap] = load_values<Width>(tokens + (chunk.first - (W - 1) + tap) * parameters.x.token);
    }
  }
  for (int token = chunk.first; token < chunk.first + chunk.tokens; ++token) {
    window[W - 1] = load_values<Width>(tokens + token * parameters.x.token);
    const Values<Width> result =
        convolve_token<W, Width>(window, filter, added, slot.is_present, seq_idx, parameters, chunk, token);
    store_values(output + token * parameters.y_token, result);
    move_window<W>(window);
  }
}
