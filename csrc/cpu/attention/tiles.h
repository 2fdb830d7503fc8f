// Some rows of q attend to keys and values tile by tile, all in f32.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/common.h"
#include "cpu/simd/aura_kernels.h"

namespace torch_gdn::cpu {

constexpr int64_t kRowsOfTile = 32;  // most rows of q, which are of one KV head
constexpr float kNoScore = -std::numeric_limits<float>::infinity();

// The keys that a row sees.
struct SeenKeys {
  int64_t first, last;
};

// What the rows of a work item carry from one tile of keys to the next. Rows are `width` floats apart, D rounded up to
// whole vectors of every ISA variant.
struct AttentionTile {
  int64_t width;
  std::vector<float> q, o, keys, values;
  alignas(64) float scores[kRowsOfTile * kTileKeys];
  alignas(64) float key_norms[kTileKeys] = {}, value_norms[kTileKeys] = {};  // factors of the keys and values
  AuraRow states[kRowsOfTile];

  AttentionTile(int64_t D, int64_t rows, int64_t most_keys)
      : width(ceil_div(D, kColumns) * kColumns),
        q(rows * width),
        o(rows * width),
        keys(most_keys * width),
        values(most_keys * width) {}

  // Attends to `count` keys from `first` on, which were read. seen(i) are the keys that row i sees.
  template <typename Seen>
  void attend(int64_t rows, int64_t first, int64_t count, const Seen& seen) {
    const auto& kernels = aura_kernels();
    const AuraTile tile{.q = q.data(),
                        .keys = keys.data(),
                        .values = values.data(),
                        .rows = rows,
                        .count = count,
                        .width = width,
                        .key_norms = key_norms,
                        .value_norms = value_norms,
                        .scores = scores,
                        .o = o.data(),
                        .states = states};
    kernels.dot_products(tile);
    for (int64_t i = 0; i < rows; ++i) {
      const SeenKeys range = seen(i);
      const int64_t from = std::clamp<int64_t>(range.first - first, 0, count);
      const int64_t to = std::clamp<int64_t>(range.last - first, from, count);
      if (from < to) kernels.online_softmax(tile, i, from, to);
      if (from == to) std::fill_n(scores + i * kTileKeys, kTileKeys, 0.0f);
    }
    kernels.add_weighted(tile);
  }
};

}  // namespace torch_gdn::cpu
