// causal_conv1d where the tokens of a channel are neighbours in memory. One threadgroup owns 32 channels of 64 tokens
// of one sequence. Loads: a simdgroup owns every fourth channel, a lane a token. Convolution: a simdgroup owns 16
// tokens, a lane a channel; so both sides move whole cache lines, where a lane that reads its channel would touch a
// line a token. In threadgroup memory: the tokens and the W - 1 before them, in f32. In registers: the last W tokens
// and the weights. Layout: x [B, T, D] with any strides, y the same, contiguous; weight [D, W]; states [N or slots, D,
// S], any strides.
#include "layers/causal_conv1d.h"

static constant constexpr const int kTileTokens = 64;  // as csrc/metal/layers/causal_conv1d.cpp has it
static constant constexpr const int kTileChannels = 32;
static constant constexpr const int kTileStride = kTileTokens + 3;  // odd: a column of channels is in 32 banks

template <typename T, typename P, typename S, int W>
[[kernel]] void causal_conv1d_channel_first(
    device const T* x [[buffer(0)]],
    device const P* weight [[buffer(1)]],
    device const P* bias [[buffer(2)]],
    device const S* state [[buffer(3)]],
    device const int* state_indices [[buffer(4)]],
    device const uchar* has_initial_state [[buffer(5)]],
    device const int64_t* cu_seqlens [[buffer(6)]],
    device const int* runs [[buffer(7)]],
    device T* y [[buffer(8)]],
    device ErrorLog* errors [[buffer(9)]],
    constant ConvolutionParameters& parameters [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(W - 1 <= kTileStride - kTileTokens, "a row has room for what is before the tokens");
  constexpr int kSimdgroups = kConvolutionThreads / 32;
  constexpr int kOwnTokens = kTileTokens / kSimdgroups;
  threadgroup float tile[kTileChannels * kTileStride];

  const Chunk chunk = locate_chunk(cu_seqlens, parameters.sequence, int(group.y), int(group.z), kTileTokens, lane);
  const Slot slot = locate_slot(state_indices, has_initial_state, parameters.slots, chunk.sequence, lane);
  if (group.x == 0 && group.y == 0 && group.z == 0 && simdgroup == 0) {
    report_cu_seqlens(cu_seqlens, parameters.sequence, kTileTokens, errors, lane);
  }
  const int first_channel = int(group.x) * kTileChannels;
  const bool has_state = parameters.has_state != 0 && slot.has_state && slot.is_present;
  device const S* columns = state + slot.index * parameters.state.slot;
  const int channels = chunk.tokens > 0 ? parameters.channels : 0;  // a surplus chunk has nothing before it either
  for (int row = int(simdgroup); row < kTileChannels; row += kSimdgroups) {
    const int64_t channel = first_channel + row;
    device const T* tokens = x + chunk.batch * parameters.x.batch + channel * parameters.x.head;
    UNROLL for (int base = -32; base < kTileTokens; base += 32) {
      const int token = base + int(lane);
      const bool is_inside = token >= 1 - W && token < chunk.tokens && channel < channels;
      if (is_inside) {
        Values<1> value;
        if (chunk.offset + token < 0) {
          device const S* own = columns + channel * parameters.state.channel;
          value = load_history<1>(own, parameters, has_state, chunk.offset + token);
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
    device T* output =
        y + (int64_t(chunk.batch) * parameters.sequence.tokens + chunk.first) * parameters.channels + channel;
    Values<1> window[W];
    UNROLL for (int tap = 0; tap + 1 < W; ++tap) window[tap].at[0] = own[first + tap];
    for (int token = first; token < last; ++token) {
      window[W - 1].at[0] = own[token + W - 1];
      const Values<1> result =
          convolve_token<W, 1>(window, filter, slot.is_present, runs, parameters, chunk, chunk.first + token);
      store_values(output + int64_t(token) * parameters.channels, result);
      move_window<W, 1>(window);
    }
  }
}
