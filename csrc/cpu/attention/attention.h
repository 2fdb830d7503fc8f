// Computes attention of packed sequences to pages. `Cache` decides what the pages contain.
#pragma once
#include <cmath>

#include "cpu/attention/tiles.h"
#include "ops/indices.h"
#include "ops/pages.h"

namespace torch_gdn::cpu::paged {

constexpr int64_t kKeysOfBlock = 2048;  // keys per block, for a sequence with one tile of rows

// The rows of a KV head. Adjacent rows are the heads of one query, and the heads of the next query follow.
struct WorkItem {
  int64_t sequence, kv_head;
  int64_t first_row, rows;
  int64_t first_key, last_key;
  int64_t blocks;   // the number of blocks of keys for this tile of rows
  int64_t partial;  // index of the partial result if there are several blocks
};

struct QueriesAndKeys {
  int64_t first, queries, keys;
};

// A token of a sequence: its position, and its place in the pool.
struct Token {
  int64_t sequence, position;
  int64_t block, offset;
};

// `Cache` has read_query() and write_result() for a row of q and a head, and read_key() and read_value() for a Token
// and a KV head. Each of the readers gives a vector, and returns a factor for that vector.
template <typename Cache>
class Attention {
 public:
  Attention(const PagedShape<>& shape, const PagedSequences<int64_t>& sequences, optional<double> scale,
            const optional<Tensor>& sinks, const Cache& cache)
      : s_(shape),
        call_(sequences),
        cache_(cache),
        ratio_(s_.HQ / s_.HK),
        scale_(static_cast<float>(scale_or_default(scale, s_.D))),
        table_(sequences.block_table) {
    if (sinks.has_value()) sinks_ = sinks->contiguous();
    const Indices boundaries(sequences.cu_seqlens), lengths(sequences.seq_lens);
    for (int64_t n = 0; n < s_.N; ++n) {
      sequences_.push_back({boundaries[n], boundaries[n + 1] - boundaries[n], lengths[n]});
    }
  }

  void run() {
    const auto items = work_items();
    share_work_items(static_cast<int64_t>(items.size()), at::get_num_threads(), [&](const auto& next) {
      const auto tile = std::make_unique<AttentionTile>(s_.D, kRowsOfTile, kTileKeys);
      for (int64_t i = next(); i < static_cast<int64_t>(items.size()); i = next()) run_item(*tile, items[i]);
    });
    merge(items);
  }

 private:
  // Returns the keys that a row sees.
  SeenKeys seen(const QueriesAndKeys& sequence, int64_t row) const {
    const int64_t position = sequence.keys - sequence.queries + row / ratio_;
    return {call_.window > 0 ? std::max<int64_t>(0, position - call_.window + 1) : 0,
            call_.causal ? position + 1 : sequence.keys};
  }

  // If a sequence has only one tile of rows, its keys are divided among work items, because it has few rows and often
  // many keys.
  std::vector<WorkItem> work_items() {
    std::vector<WorkItem> items;
    int64_t partials = 0;
    for (int64_t n = 0; n < s_.N; ++n) {
      const int64_t rows = sequences_[n].queries * ratio_;
      for (int64_t head = 0; head < s_.HK; ++head) {
        for (int64_t row = 0; row < rows; row += kRowsOfTile) {
          const int64_t count = std::min(kRowsOfTile, rows - row);
          const int64_t first = seen(sequences_[n], row).first, last = seen(sequences_[n], row + count - 1).last;
          const int64_t keys = rows <= kRowsOfTile ? kKeysOfBlock : std::max<int64_t>(1, last - first);
          const int64_t blocks = std::max<int64_t>(1, ceil_div(last - first, keys));
          for (int64_t key = first; key < std::max(last, first + 1); key += keys) {
            items.push_back({n, head, row, count, key, std::min(last, key + keys), blocks, partials});
            if (blocks > 1) partials += count;
          }
        }
      }
    }
    partial_o_.resize(partials * s_.D);
    partial_states_.resize(partials);
    return items;
  }

  void run_item(AttentionTile& tile, const WorkItem& item) {
    const auto& sequence = sequences_[item.sequence];
    for (int64_t i = 0; i < item.rows; ++i) {
      const int64_t row = item.first_row + i;
      cache_.read_query(sequence.first + row / ratio_, head_of(item, row), tile.q.data() + i * tile.width);
      tile.states[i] = {.m = kNoScore, .l = 0};
    }
    std::fill(tile.o.begin(), tile.o.end(), 0.0f);
    for (int64_t key = item.first_key; key < item.last_key; key += kTileKeys) {
      const int64_t count = std::min(kTileKeys, item.last_key - key);
      read_keys(tile, item, key, count);
      tile.attend(item.rows, key, count, [&](int64_t i) { return seen(sequence, item.first_row + i); });
    }
    for (int64_t i = 0; i < item.rows; ++i) {
      float* o = tile.o.data() + i * tile.width;
      if (item.blocks == 1) {
        write_row(item, item.first_row + i, tile.states[i], o);
      } else {
        std::copy_n(o, s_.D, partial_o_.data() + (item.partial + i) * s_.D);
        partial_states_[item.partial + i] = tile.states[i];
      }
    }
  }

  void read_keys(AttentionTile& tile, const WorkItem& item, int64_t first, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = first + i;
      const Token token{item.sequence, position, table_.at(item.sequence, position / s_.block_size),
                        position % s_.block_size};
      tile.key_norms[i] = scale_ * cache_.read_key(token, item.kv_head, tile.keys.data() + i * tile.width);
      tile.value_norms[i] = cache_.read_value(token, item.kv_head, tile.values.data() + i * tile.width);
    }
  }

  // The blocks of a tile of rows are adjacent in `items`.
  void merge(const std::vector<WorkItem>& items) {
    at::parallel_for(0, static_cast<int64_t>(items.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto& item = items[i];
        if (item.blocks == 1 || item.first_key != seen(sequences_[item.sequence], item.first_row).first) continue;
        for (int64_t row = 0; row < item.rows; ++row) merge_row(item, row);
      }
    });
  }

  void merge_row(const WorkItem& item, int64_t row) {
    std::vector<float> o(s_.D);
    AuraRow merged{.m = kNoScore, .l = 0};
    for (int64_t i = 0; i < item.blocks; ++i) {
      const int64_t at = item.partial + i * item.rows + row;
      merged.m = std::max(merged.m, partial_states_[at].m);
    }
    for (int64_t i = 0; i < item.blocks; ++i) {
      const int64_t at = item.partial + i * item.rows + row;
      const auto& [m, l, tile_score] = partial_states_[at];
      const float factor = l == 0.0f ? 0.0f : std::exp(m - merged.m);
      merged.l += factor * l;
      for (int64_t d = 0; d < s_.D; ++d) o[d] += factor * partial_o_[at * s_.D + d];
    }
    write_row(item, item.first_row + row, merged, o.data());
  }

  // A sink is a score without a value.
  void write_row(const WorkItem& item, int64_t row, const AuraRow& state, float* o) const {
    const int64_t head = head_of(item, row);
    float factor = 1.0f, sum = state.l;
    if (sinks_.defined()) {
      const float sink = sinks_.const_data_ptr<float>()[head], largest = std::max(sink, state.m);
      factor = state.l == 0.0f ? 0.0f : std::exp(state.m - largest);
      sum = factor * state.l + std::exp(sink - largest);
    }
    const float inverse = sum == 0.0f ? 0.0f : factor / sum;  // the result is 0 for a row that saw no key
    for (int64_t d = 0; d < s_.D; ++d) o[d] *= inverse;
    cache_.write_result(sequences_[item.sequence].first + row / ratio_, head, o);
  }

  int64_t head_of(const WorkItem& item, int64_t row) const { return item.kv_head * ratio_ + row % ratio_; }

  const PagedShape<>& s_;
  const PagedSequences<int64_t>& call_;
  const Cache& cache_;
  int64_t ratio_;
  float scale_;
  Tensor sinks_;
  Indices table_;
  std::vector<QueriesAndKeys> sequences_;
  std::vector<float> partial_o_;
  std::vector<AuraRow> partial_states_;
};

}  // namespace torch_gdn::cpu::paged
