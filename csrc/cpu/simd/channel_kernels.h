// The inner loops, in f32, of the chunked op of Kimi Delta Attention, which has one decay per key channel.
#pragma once
#include "cpu/simd/gdn_kernels.h"

namespace torch_gdn::cpu {

constexpr int64_t kChannelsAtOnce = 16;  // rows of tiles have a multiple of this many floats; they are zero past K
inline int64_t padded_channels(int64_t K) { return ceil_div(K, kChannelsAtOnce) * kChannelsAtOnce; }

// A chunk's tokens of one key head. Rows are K floats apart.
struct ChannelKeys {
  int64_t tokens, rows, K;                   // rows and K after padding
  alignas(64) float q[kTokens * kLargestK];  // normalised if requested, and scaled
  alignas(64) float k[kTokens * kLargestK];
};

// The same tokens after the decays of a value head. c is the cumulative sum of log decays.
struct ChannelTiles {
  int64_t tokens, rows, K;
  alignas(64) float q[kTokens * kLargestK];              // q exp(c)
  alignas(64) float k[kTokens * kLargestK];              // k exp(c)
  alignas(64) float k_writing[kTokens * kLargestK];      // k exp(c_last - c)
  alignas(64) float base[kLargestK], change[kLargestK];  // as in HeadTiles
  alignas(64) float log_decays[kTokens * kLargestK];
  alignas(64) float left[kTokens * kLargestK];  // c_last - c, up to the tokens processed so far
  alignas(64) float update[kTokens * kTokens];  // these two are as in HeadTiles
  alignas(64) float scores[kTokens * kTokens];
  alignas(64) float beta[kTokens], reading[kTokens], querying[kTokens], writing[kTokens];
};

// g and beta of a value head. With `gate`, g is raw. Its log decay is -rate softplus(g + bias), or lower_bound
// sigmoid(rate (g + bias)) with a lower_bound below 0.
struct ChannelGates {
  HeadRows g;
  const float* beta;
  int64_t beta_stride;  // floats between tokens
  int64_t width;        // K
  bool gate;
  float rate, lower_bound;
  const float* bias;  // `padded_channels(width)` values, or nullptr
};

struct ChannelKernels {
  void (*read_keys)(const HeadRows& q, const HeadRows& k, int64_t width, bool normalise, float scale,
                    ChannelKeys& keys);
  void (*make_head)(const ChannelKeys& keys, const ChannelGates& gates, ChannelTiles& tiles);
  // Computes the log decays of one raw row of g with any width.
  void (*write_log_decays)(const ChannelGates& gates, const HeadRows& out);
  // Does the same as ChunkKernels::advance.
  void (*advance)(const ChannelTiles& tiles, const HeadRows& v, const HeadRows& o, int64_t columns, float* state,
                  PanelTiles<float>& panel);
};

const ChannelKernels& channel_kernels();

}  // namespace torch_gdn::cpu
