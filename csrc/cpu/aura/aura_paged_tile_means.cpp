#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/common.h"
#include "cpu/define.h"
#include "ops/aura/pages.h"
#include "shaders/aura/pages.h"

namespace torch_gdn::cpu {

namespace {

class TileMeans {
 public:
  explicit TileMeans(const AuraPagedTileMeans<int64_t>& op)
      : op_(op),
        table_(op.sequences.block_table),
        boundaries_(op.sequences.cu_seqlens),
        lengths_(op.sequences.seq_lens),
        slots_(op.exact_slots),
        starts_(op.exact_starts),
        keys_(op.keys.unsqueeze(0)),
        exact_keys_(op.exact_keys),
        means_(op.tile_means) {}

  // Sequences may share a tile only if none of them begins it.
  void run() const {
    for (int64_t n = 0; n < op_.shape.N; ++n) {
      const int64_t queries = boundaries_[n + 1] - boundaries_[n];
      if (queries == 0) continue;
      const int64_t first_new = lengths_[n] - queries, first = ceil_div(first_new, kTokensOfTile);
      const int64_t tiles = ceil_div(lengths_[n], kTokensOfTile) - first, heads = op_.shape.HK;
      at::parallel_for(0, std::max<int64_t>(0, tiles) * heads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) find({n, first_new}, first + i / heads, i % heads);
      });
    }
  }

 private:
  struct Sequence {
    int64_t index, first_new;
  };

  void find(const Sequence& sequence, int64_t tile, int64_t head) const {
    const auto [n, first_new] = sequence;
    const int64_t D = op_.shape.D, last = std::min((tile + 1) * kTokensOfTile, lengths_[n]);
    const int64_t lowest = std::max(last - kTokensOfTile, op_.sinks);
    const int64_t first_held = slots_[n] < 0 ? first_new : std::max({lowest, first_new - op_.tail, starts_[n]});
    const int64_t held = std::max<int64_t>(0, first_new - first_held);
    const int64_t from_new = std::max<int64_t>(0, last - std::max(lowest, first_new));
    std::vector<float> row(D), sum(D);
    if (held + from_new < kLeastKeysOfMean && tile > 0) {
      read_mean(n, tile - 1, head, row.data());
      return write_mean(n, tile, head, row.data());
    }
    const int64_t ring = op_.exact_keys.size(1) - op_.sinks;
    for (int64_t p = first_new - held; p < first_new; ++p) {
      exact_keys_.read(slots_[n], op_.sinks + p % ring, head, row.data());
      for (int64_t d = 0; d < D; ++d) sum[d] += row[d];
    }
    for (int64_t p = last - from_new; p < last; ++p) {
      keys_.read(0, boundaries_[n] + p - first_new, head, row.data());
      for (int64_t d = 0; d < D; ++d) sum[d] += row[d];
    }
    for (int64_t d = 0; d < D; ++d) {
      const float mean = sum[d] / static_cast<float>(held + from_new);  // NaN if there is no key
      sum[d] = std::fabs(mean) < 65520.0f ? mean : 0.0f;                // a larger one would become infinite
    }
    write_mean(n, tile, head, sum.data());
  }

  int64_t block_of(int64_t n, int64_t tile) const { return table_.at(n, tile / op_.tile_means.size(1)); }
  void read_mean(int64_t n, int64_t tile, int64_t head, float* row) const {
    means_.read(block_of(n, tile), tile % op_.tile_means.size(1), head, row);
  }
  void write_mean(int64_t n, int64_t tile, int64_t head, const float* row) const {
    means_.write(block_of(n, tile), tile % op_.tile_means.size(1), head, row);
  }

  const AuraPagedTileMeans<int64_t>& op_;
  Indices table_, boundaries_, lengths_, slots_, starts_;
  Rows keys_, exact_keys_, means_;
};

void run(const AuraPagedTileMeans<int64_t>& op) { TileMeans(op).run(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { define<AuraPagedTileMeans, &run>(m); }

}  // namespace torch_gdn::cpu
