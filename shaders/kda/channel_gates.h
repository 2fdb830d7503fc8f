// Log decays of key channels, final or raw. A thread owns channels and has 8 tokens of each at a time.
#pragma once
#include "core/fragment.h"
#include "core/gate_of_channel.h"

// Item `item` of a chunk's [blocks of 8 tokens, channels].
struct ChannelItem {
  int block, channel;
  bool is_there;
};

template <int Blocks, int Padded>
METAL_FUNC ChannelItem channel_item(int item) {
  ChannelItem at;
  at.block = item / Padded;
  at.channel = item % Padded;
  at.is_there = item < Blocks * Padded;
  return at;
}

// gates[8 n + row]: as passed, of the thread's n-th item; tokens from `count` on do not exist.
template <int Padded, int Blocks, int Items, int Threads, typename G>
METAL_FUNC void load_channels(
    thread float* gates,
    device const G* g,
    int64_t token_stride,
    int channels,
    int first,
    int count,
    uint thread_index) {
  UNROLL for (int n = 0; n < Items; ++n) {
    const ChannelItem at = channel_item<Blocks, Padded>(n * Threads + int(thread_index));
    const int rows = at.is_there && at.channel < channels ? count - at.block * 8 : 0;
    device const G* source = g + (int64_t(first) + at.block * 8) * token_stride + at.channel;
    UNROLL for (int row = 0; row < 8; ++row) {
      gates[n * 8 + row] = row < rows ? float(*source) : 0.0f;
      source += token_stride;
    }
  }
}

// Of the channels from first_channel on, the first `channels`.
template <int Padded, int Blocks, int Items, int Threads>
METAL_FUNC void load_channel_gates(
    thread float* gates,
    device const uchar* g,
    constant ChannelGateParameters& parameters,
    int64_t batch,
    int64_t head,
    int first_channel,
    int channels,
    int first,
    int count,
    uint thread_index) {
  const int64_t origin = batch * parameters.g.batch + head * parameters.g.head + first_channel;
  const int64_t stride = parameters.g.token;
  if (parameters.g_type == kFloat32) {
    load_channels<Padded, Blocks, Items, Threads>(
        gates, (device const float*)g + origin, stride, channels, first, count, thread_index);
  } else if (parameters.g_type == kFloat16) {
    load_channels<Padded, Blocks, Items, Threads>(
        gates, (device const half*)g + origin, stride, channels, first, count, thread_index);
  } else {
    load_channels<Padded, Blocks, Items, Threads>(
        gates, (device const bfloat*)g + origin, stride, channels, first, count, thread_index);
  }
}

// e = exp(g) of 8 tokens, the first `count` of which exist, into a column of a tile. Returns the sum of their log
// decays.
METAL_FUNC float store_block_decays(
    threadgroup float* decays,
    int stride,
    thread const float* raw_gates,
    ChannelGate channel_gate,
    constant ChannelGateParameters& parameters,
    int count) {
  float sum = 0.0f;
  UNROLL for (int row = 0; row < 8; ++row) {
    const float gate = channel_log_decay(raw_gates[row], channel_gate, parameters);
    const float log_decay = row < count ? clamped_log_decay(gate) : 0.0f;
    decays[row * stride] = gate_exp(log_decay);
    sum += log_decay;
  }
  return sum;
}

// Of a channel's column of 8 tokens: q <- q D(0, i), k <- k D(0, i), and k D(i, 8) in the place of e. The tiles lie
// `tile` floats apart.
METAL_FUNC void decay_block(threadgroup float* queries, int tile, int stride) {
  threadgroup float* keys = queries + tile;
  threadgroup float* decays = keys + tile;
  float decay[8];
  UNROLL for (int row = 0; row < 8; ++row) decay[row] = decays[row * stride];
  float after = 1.0f;
  UNROLL for (int row = 7; row >= 0; --row) {
    decays[row * stride] = keys[row * stride] * after;
    after *= decay[row];
  }
  float before = 1.0f;
  UNROLL for (int row = 0; row < 8; ++row) {
    before *= decay[row];
    queries[row * stride] *= before;
    keys[row * stride] *= before;
  }
}
