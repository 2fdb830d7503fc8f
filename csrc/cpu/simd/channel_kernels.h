// The inner loops of the chunked op of Kimi Delta Attention, which has one decay per key channel, in f32.
#pragma once
#include "cpu/simd/gdn_kernels.h"

namespace torch_gdn::cpu {

constexpr int64_t kChannelsAtOnce = 16;  // rows of tiles have a multiple of this many floats, zero past K
inline int64_t padded_channels(int64_t K) { return ceil_div(K, kChannelsAtOnce) * kChannelsAtOnce; }

// One key head's tokens of a chunk. Rows are K floats apart.
struct ChannelKeys {
  int64_t tokens, rows, K;                   // rows and K as padded
  alignas(64) float q[kTokens * kLargestK];  // normalised if requested, and scaled
  alignas(64) float k[kTokens * kLargestK];
};

// The same tokens with a value head's decays applied. c is the cumulative sum of log decays.
struct ChannelTiles {
  int64_t tokens, rows, K;
  alignas(64) float q[kTokens * kLargestK];              // q exp(c)
  alignas(64) float k[kTokens * kLargestK];              // k exp(c)
  alignas(64) float k_writing[kTokens * kLargestK];      // k exp(c_last - c)
  alignas(64) float base[kLargestK], change[kLargestK];  // as in HeadTiles
  alignas(64) float log_decays[kTokens * kLargestK];
  alignas(64) float left[kTokens * kLargestK];  // c_last - c, up to the tokens processed so far
  alignas(64) float update[kTokens * kTokens];  // this and the next are as in HeadTiles
  alignas(64) float scores[kTokens * kTokens];
  alignas(64) float beta[kTokens], reading[kTokens], querying[kTokens], writing[kTokens];
};

// g and beta of a value head. With `gate`, g is raw: its log decay is -rate softplus(g + bias), or with a lower_bound
// below 0 lower_bound sigmoid(rate (g + bias)).
struct ChannelGates {
  HeadRows g;
  const float* beta;
  int64_t beta_stride;  // floats from token to token
  int64_t width;        // K
  bool gate;
  float rate, lower_bound;
  const float* bias;  // as many as `padded_channels(width)`, or nullptr
};

struct ChannelKernels {
  void (*read_keys)(const HeadRows& q, const HeadRows& k, int64_t width, bool normalise, float scale,
                    ChannelKeys& keys);
  void (*make_head)(const ChannelKeys& keys, const ChannelGates& gates, ChannelTiles& tiles);
  // Computes the log decays of one raw row of g, of any width.
  void (*write_log_decays)(const ChannelGates& gates, const HeadRows& out);
  // Works as ChunkKernels::advance does.
  void (*advance)(const ChannelTiles& tiles, const HeadRows& v, const HeadRows& o, int64_t columns, float* state,
                  PanelTiles<float>& panel);
};

const ChannelKernels& channel_kernels();

}  // namespace torch_gdn::cpu
