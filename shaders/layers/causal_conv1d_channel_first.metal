// The kernel for an x whose tokens are neighbours. A threadgroup owns 32 channels of 64 tokens of one sequence. A
// simdgroup loads every fourth channel, with one token per lane, and convolves 16 tokens, with one channel per lane.
// Both the loads and the stores therefore move whole cache lines.
// Threadgroup memory: the tokens and the W - 1 tokens before them, in f32. Registers: the last W tokens and the
// weights.
// Layout: x [B, T, D] with any strides, y with row strides; weight [D, W]; states [N or slots, D, S] with any strides.
#include "layers/convolution.h"
#include "layers/convolution_window.h"

GDN_CONSTANT int kTileStride = kChannelFirstTokens + 3;  // odd, so that a column of channels lies in 32 banks

template <typename T, typename Weight, typename State, int W>
[[kernel]] void causal_conv1d_channel_first(
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
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(W - 1 <= kTileStride - kChannelFirstTokens, "a row holds the tokens before too");
  constexpr int kSimdgroups = kConvolutionThreads / 32;
  constexpr int kOwnTokens = kChannelFirstTokens / kSimdgroups;
  threadgroup float tile[kChannelFirstChannels * kTileStride];

  const Chunk chunk = locate_own_chunk(
      cu_seqlens, parameters.sequence, uint3(group.y, group.x, group.z), kChannelFirstTokens, errors, simdgroup, lane);
  const Slot slot = locate_slot(state_indices, has_initial_state, parameters.slots, chunk.sequence, lane);
  const int first_channel = int(group.x) * kChannelFirstChannels;
  const bool has_state = parameters.has_state != 0 && slot.has_state && slot.is_present;
  device const State* columns = state + slot.index * parameters.state.slot;
  const int channels = chunk.tokens > 0 ? parameters.channels : 0;  // a surplus chunk has no history
  for (int row = int(simdgroup); row < kChannelFirstChannels; row += kSimdgroups) {
    const int64_t channel = first_channel + row;
    device const T* tokens = x + chunk.batch * parameters.x.batch + channel * parameters.x.head;
    UNROLL for (int base = -32; base < kChannelFirstTokens; base += 32) {
      const int token = base + int(lane);
      const bool is_inside = token >= 1 - W && token < chunk.tokens && channel < channels;
      if (is_inside) {
        Values<1> value;
        if (chunk.offset + token < 0) {
          device const State* own = columns + channel * parameters.state.channel;
          value = load_history<1>(own, parameters, has_state, parameters.columns, chunk.offset + token);
        } else {
          value = load_values<1>(tokens + (chunk.first + token) * parameters.x.token);
        }
        tile[row * kTileStride + token + W - 1] = value.at[0];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const int channel = first_channel + int(lane);
  const int first = int(simdgroup) * kOwnTokens;
  const int last = min(first + kOwnTokens, chunk.tokens);
  if (channel < parameters.channels && first < last) {
    const Filter<W, 1> filter = load_filter<W, 1>(weight, bias, parameters, channel);
    threadgroup const float* own = tile + int(lane) * kTileStride;
    device const T* added = residual + chunk.batch * parameters.residual.batch + channel * parameters.residual.head;
    device T* output = y + chunk.batch * parameters.y_batch + chunk.first * parameters.y_token + channel;
    Values<1> window[W];
    UNROLL for (int tap = 0; tap + 1 < W; ++tap) window[tap].at[0] = own[first + tap];
    for (int token = first; token < last; ++token) {
      window[W - 1].at[0] = own[token + W - 1];
      const Values<1> result =
          convolve_token<W, 1>(window, filter, added, slot.is_present, seq_idx, parameters, chunk, chunk.first + token);
      store_values(output + token * parameters.y_token, result);
      move_window<W>(window);
    }
  }
}
