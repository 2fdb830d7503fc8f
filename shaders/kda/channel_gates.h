// Computes log decays of key channels from a final or raw g. A thread owns channels, and processes 8 tokens of each at
// a time.
#pragma once
#include "core/fragment.h"
#include "core/gates.h"

// Work item `item` of a chunk's [blocks of 8 tokens, channels].
struct ChannelItem {
  int block, channel;
  bool is_there;
};

template <int Blocks, int Padded>
METAL_FUNC ChannelItem channel_item(uint item) {
  return {int(item / Padded), int(item % Padded), item < Blocks * Padded};
}

// Loads gates[8 n + row] as they were passed: 8 tokens of a channel from element offsets[n] on. Only the first rows[n]
// exist.
template <int Items, typename G>
METAL_FUNC void load_channels(
    thread float* gates, device const G* g, int64_t stride, thread const int64_t* offsets, thread const int* rows) {
  UNROLL for (int n = 0; n < Items; ++n) {
    device const G* source = g + offsets[n];
    UNROLL for (int row = 0; row < 8; ++row) {
      gates[n * 8 + row] = row < rows[n] ? float(*source) : 0.0f;
      source += stride;
    }
  }
}

template <int Items>
METAL_FUNC void load_channel_gates(
    thread float* gates,
    device const uchar* g,
    constant ChannelGateParameters& parameters,
    thread const int64_t* offsets,
    thread const int* rows) {
  const int64_t stride = parameters.g.token;
  if (parameters.g_type == kFloat32) {
    load_channels<Items>(gates, (device const float*)g, stride, offsets, rows);
  } else if (parameters.g_type == kFloat16) {
    load_channels<Items>(gates, (device const half*)g, stride, offsets, rows);
  } else {
    load_channels<Items>(gates, (device const bfloat*)g, stride, offsets, rows);
  }
}

// Writes e = exp(g) of 8 tokens into a column of a tile. Only the first `count` tokens exist. Returns the sum of their
// log decays.
METAL_FUNC float store_block_decays(
    threadgroup float* decays,
    int stride,
    thread const float* raw_gates,
    ChannelGate channel_gate,
    constant ChannelGateParameters& parameters,
    int count) {
  // Copies the gates through the tile, so that the loop below need not be unrolled. Unrolling would take 600 more
  // instructions.
  UNROLL for (int row = 0; row < 8; ++row) decays[row * stride] = raw_gates[row];
  float sum = 0.0f;
  for (int row = 0; row < 8; ++row) {
    const float gate = channel_log_decay(decays[row * stride], channel_gate, parameters);
    const float log_decay = row < count ? clamped_log_decay(gate) : 0.0f;
    decays[row * stride] = gate_exp(log_decay);
    sum += log_decay;
  }
  return sum;
}

// Updates a channel's column of 8 tokens: q <- q D(0, i), k <- k D(0, i), and e is replaced by k D(i, 8). The tiles are
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
