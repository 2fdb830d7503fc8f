// The kernels of ChannelKernels for one ISA variant. exp(-c) may be infinite, so the code only takes exp of sums of log
// decays between two tokens. Nothing then cancels, and no factor is above 1. It works in blocks of 8 tokens. Within a
// block, it computes each pair of tokens separately. Between blocks, it multiplies the decay of a key up to the start
// of a block by the decay from there to the token that reads the key.
#include "cpu/simd/chunk.h"

constexpr int64_t kBlock = kRowsAtOnce, kDots = 4;

TORCH_GDN_INLINE void scale_row(float* x, int64_t count, float factor) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

void read_channel_keys(const HeadRows& q, const HeadRows& k, int64_t width, bool normalise, float scale,
                       ChannelKeys& keys) {
  prefetch_rows(q, kTokens, keys.tokens, width);
  prefetch_rows(k, kTokens, keys.tokens, width);
  upcast_rows(q, keys.tokens, keys.rows, width, keys.q, keys.K);
  upcast_rows(k, keys.tokens, keys.rows, width, keys.k, keys.K);
  for (int64_t i = 0; i < keys.tokens; ++i) {
    if (normalise) {
      normalise_row(keys.q + i * keys.K, keys.K, kNormEps);
      normalise_row(keys.k + i * keys.K, keys.K, kNormEps);
    }
    scale_row(keys.q + i * keys.K, keys.K, scale);
  }
}

TORCH_GDN_INLINE Floats log_decay(Floats raw, const Gates& gates, int64_t channel) {
  const Floats x = gates.bias ? raw + load(gates.bias + channel) : raw;
  return gates.lower_bound < 0 ? gates.lower_bound * sigmoid(gates.rate * x) : -gates.rate * softplus(x);
}

// Writes zeros past the chunk.
TORCH_GDN_INLINE void read_log_decays(const ChannelKeys& keys, const Gates& gates, float* out) {
  prefetch_rows(gates.g, kTokens, keys.tokens, gates.width);
  upcast_rows(gates.g, keys.tokens, keys.rows, gates.width, out, keys.K);
  if (!gates.gate) return;
  for (int64_t i = 0; i < keys.tokens; ++i) {
    for (int64_t d = 0; d < keys.K; d += kLanes) {
      float* at = out + i * keys.K + d;
      store(at, log_decay(load(at), gates, d));
    }
  }
}

void write_log_decays(const Gates& gates, const HeadRows& out) {
  alignas(64) float row[kLargestK] = {};
  for (int64_t first = 0; first < gates.width; first += kLargestK) {
    const int64_t count = gates.width - first < kLargestK ? gates.width - first : kLargestK;
    upcast_row(gates.g.data + first * item_size(gates.g.dtype), gates.g.dtype, count, row);
    for (int64_t d = 0; d < count; d += kLanes) store(row + d, log_decay(load(row + d), gates, first + d));
    downcast_row(row, count, out.dtype, out.data + first * item_size(out.dtype));
  }
}

// Computes k_i . k_j and q_i . k_j for token j of a block and each later token i of the block, with the decay from j to
// i.
TORCH_GDN_INLINE void multiply_by_key(const ChannelKeys& keys, ChannelTiles& tiles, int64_t first, int64_t j) {
  const int64_t K = keys.K, rows = first * K;
  Floats k_sums[kBlock] = {}, q_sums[kBlock] = {};
  for (int64_t d = 0; d < K; d += kLanes) {
    const float *q = keys.q + rows + d, *k = keys.k + rows + d, *g = tiles.log_decays + rows + d;
    const Floats key = load(k + j * K);
    Floats passed{};
#pragma GCC unroll 8
    for (int64_t i = 0; i < kBlock; ++i) {
      if (i < j) continue;
      if (i > j) passed += load(g + i * K);
      const Floats decayed = i > j ? times_exponential(key, passed) : key;
      k_sums[i] += load(k + i * K) * decayed;
      q_sums[i] += load(q + i * K) * decayed;
    }
  }
#pragma GCC unroll 8
  for (int64_t i = 0; i < kBlock; ++i) {
    const int64_t at = (first + i) * kTokens + first + j;
    tiles.update[at] = i > j ? sum_of_lanes(k_sums[i]) : 0.0f;
    tiles.scores[at] = i < j ? 0.0f : sum_of_lanes(q_sums[i]);
  }
}

// Computes out[i][j] = a_i . b_j for kDots rows of each.
TORCH_GDN_INLINE void multiply_rows(const float* a, const float* b, int64_t K, float* out) {
  Floats sums[kDots * kDots] = {};
  for (int64_t d = 0; d < K; d += kLanes) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < kDots; ++i) {
#pragma GCC unroll 4
      for (int64_t j = 0; j < kDots; ++j) sums[i * kDots + j] += load(a + i * K + d) * load(b + j * K + d);
    }
  }
  alignas(64) float dots[kDots * kDots];
#pragma GCC unroll 4
  for (int64_t first = 0; first < kDots * kDots; first += kLanes) {
    Floats part[kLanes];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; ++i) part[i] = sums[first + i];
    store(dots + first, sums_of_lanes(part));
  }
  for (int64_t i = 0; i < kDots; ++i) __builtin_memcpy(out + i * kTokens, dots + i * kDots, kDots * sizeof(float));
}

// Computes q and k of a block with the decay from the start of the block, and with the decay from the start of the
// chunk. `before` is the log decay from the start of the chunk to the block.
struct BlockRows {
  alignas(64) float q[kBlock * kLargestK], k[kBlock * kLargestK];
};

TORCH_GDN_INLINE void decay_block(const ChannelKeys& keys, ChannelTiles& tiles, int64_t first, const float* before,
                                  BlockRows& block) {
  for (int64_t d = 0; d < keys.K; d += kLanes) {
    const Floats earlier = load(before + d);
    Floats passed{};
    for (int64_t i = 0; i < kBlock; ++i) {
      const int64_t at = (first + i) * keys.K + d, in_block = i * keys.K + d;
      passed += load(tiles.log_decays + at);
      const Floats q = load(keys.q + at), k = load(keys.k + at);
      store(block.q + in_block, times_exponential(q, passed));
      store(block.k + in_block, times_exponential(k, passed));
      store(tiles.q + at, times_exponential(q, earlier + passed));
      store(tiles.k + at, times_exponential(k, earlier + passed));
    }
  }
}

// Computes the keys up to the end of a block, with their decay up to there.
TORCH_GDN_INLINE void leave_block(const ChannelKeys& keys, ChannelTiles& tiles, int64_t first, float* before) {
  for (int64_t d = 0; d < keys.K; d += kLanes) {
    Floats passed{};
    for (int64_t i = first + kBlock - 1; i >= first; --i) {
      const int64_t at = i * keys.K + d;
      store(tiles.left + at, passed);
      store(tiles.k_writing + at, times_exponential(load(keys.k + at), passed));
      passed += load(tiles.log_decays + at);
    }
    for (int64_t i = 0; i < first; ++i) {
      const int64_t at = i * keys.K + d;
      const Floats left = load(tiles.left + at) + passed;
      store(tiles.left + at, left);
      store(tiles.k_writing + at, times_exponential(load(keys.k + at), left));
    }
    store(before + d, load(before + d) + passed);
  }
}

TORCH_GDN_INLINE void read_betas(const Gates& gates, ChannelTiles& tiles) {
  for (int64_t i = 0; i < kTokens; ++i) {
    tiles.reading[i] = tiles.beta[i] = i < tiles.tokens ? number_at(gates.beta, i) : 0.0f;
    tiles.querying[i] = tiles.writing[i] = 1.0f;
  }
}

void make_channels(const ChannelKeys& keys, const Gates& gates, ChannelTiles& tiles) {
  const int64_t K = keys.K;
  tiles.tokens = keys.tokens, tiles.rows = keys.rows, tiles.K = K;
  read_betas(gates, tiles);
  read_log_decays(keys, gates, tiles.log_decays);
  alignas(64) float before[kLargestK] = {};
  BlockRows block;
  for (int64_t first = 0; first < keys.rows; first += kBlock) {
    for (int64_t j = 0; j < kBlock; ++j) multiply_by_key(keys, tiles, first, j);
    decay_block(keys, tiles, first, before, block);
    for (int64_t i = 0; i < kBlock; i += kDots) {
      for (int64_t j = 0; j < first; j += kDots) {
        const int64_t at = (first + i) * kTokens + j;
        multiply_rows(block.k + i * K, tiles.k_writing + j * K, K, tiles.update + at);
        multiply_rows(block.q + i * K, tiles.k_writing + j * K, K, tiles.scores + at);
      }
    }
    leave_block(keys, tiles, first, before);
  }
  for (int64_t d = 0; d < K; d += kLanes) {
    const auto [base, change] = decay_parts(load(before + d));
    store(tiles.base + d, base);
    store(tiles.change + d, change);
  }
  for (int64_t i = 0; i < keys.rows; ++i)
    scale_row(tiles.update + i * kTokens, i / kBlock * kBlock + kBlock, -tiles.beta[i]);
}

void advance_channels(const ChannelKeys&, const ChannelTiles& tiles, const HeadRows& v, const HeadRows& o,
                      int64_t columns, float* state, float*, PanelTiles<float>& panel) {
  const float* k_writing = tiles.k_writing;
  const auto decay = [&](int64_t channel) __attribute__((always_inline)) {
    return std::pair(tiles.base[channel], tiles.change[channel]);
  };
  advance_panel(tiles, tiles, k_writing, decay, v, o, columns, state, state, panel);
}

constexpr ChannelKernels kChannelKernels = {{&read_channel_keys, &make_channels, &advance_channels, nullptr},
                                            &write_log_decays};
