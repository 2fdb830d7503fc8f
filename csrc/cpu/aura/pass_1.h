// Pass 1 of attention computes a softmax over each block of keys. `Keys` reads keys and values as f32. It has:
//   blocks(), first_block()            the number of its blocks, and the first one's index among a row's partials
//   count(), block_size()              the number of keys, and of keys per block
//   index_of(position)                 the index of the first key at a position or after it
//   read_query(b, head, query, row)    reads q, rotated like the keys and scaled
//   tile_score(b, head, query, key)    what is added to a score, the same for the keys of a tile
//   read_tile(b, hk, first, count, item, width)    reads `count` keys and values into the work item
#pragma once
#include <cmath>
#include <limits>

#include "cpu/aura/aura_flash.h"
#include "cpu/aura/vectors.h"
#include "cpu/simd/aura_kernels.h"

namespace torch_gdn::cpu {

// A work item is a block of keys of one KV head and up to kFlashRows rows of its query heads, which share kTileKeys
// keys in f32: keys 0 to kTileKeys - 1, and so on. Rows of a tile are `width` floats apart, D rounded up to whole
// kFlashColumns.
constexpr int64_t kFlashColumns = 32;
constexpr int64_t kKeysTogether = 16;  // at most, in a register of the kernels, which read that far past the last key

// The state that the rows of a work item carry from tile to tile.
struct WorkItem {
  std::vector<float> memory;
  float *q, *o, *keys, *values;  // [rows, width] and [keys_of_tile, width], two of each
  alignas(64) float scores[kFlashRows * kTileKeys];
  alignas(64) float key_norms[kTileKeys], value_norms[kTileKeys];
  AuraRow states[kFlashRows];
  int64_t first[kFlashRows], last[kFlashRows];  // the keys that a row sees

  WorkItem(int64_t rows, int64_t keys_of_tile, int64_t width) : memory(2 * (rows + keys_of_tile) * width) {
    q = memory.data();
    o = q + rows * width;
    keys = o + rows * width;
    values = keys + keys_of_tile * width;
  }
};

template <typename Keys>
class Pass1 {
 public:
  Pass1(const Keys& keys, const Visibility<int64_t>& visibility, const AuraShape<>& shape, const Partials& partials)
      : keys_(keys),
        visibility_(visibility),
        s_(shape),
        ratio_(s_.HQ / s_.HK),
        width_(ceil_div(s_.D, kFlashColumns) * kFlashColumns) {
    const auto& [o, m, l] = partials;
    o_ = o.template mutable_data_ptr<float>();
    m_ = m.template mutable_data_ptr<float>();
    l_ = l.template mutable_data_ptr<float>();
    if (visibility.starts.has_value()) starts_ = visibility.starts->to(at::kLong).contiguous();
  }

  void run() const {
    const int64_t row_tiles = ceil_div(s_.L * ratio_, kFlashRows), blocks = keys_.blocks();
    const int64_t keys_of_tile = std::min(kTileKeys, ceil_div(keys_.count(), kKeysTogether) * kKeysTogether);
    at::parallel_for(0, s_.B * s_.HK * blocks * row_tiles, 1, [&](int64_t begin, int64_t end) {
      const auto item = std::make_unique<WorkItem>(std::min(kFlashRows, s_.L * ratio_), keys_of_tile, width_);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t tile = i % row_tiles, block = i / row_tiles % blocks, head = i / row_tiles / blocks;
        run_item(*item, head / s_.HK, head % s_.HK, block, tile * kFlashRows);
      }
    });
  }

 private:
  // Adjacent rows are the heads of one query, so they see the same keys or nearly the same.
  int64_t query_of(int64_t row) const { return row / ratio_; }
  int64_t head_of(int64_t row, int64_t hk) const { return hk * ratio_ + row % ratio_; }

  void run_item(WorkItem& item, int64_t b, int64_t hk, int64_t block, int64_t first_row) const {
    const int64_t count = std::min(kFlashRows, s_.L * ratio_ - first_row);
    const int64_t block_first = block * keys_.block_size();
    const int64_t block_last = std::min(keys_.count(), block_first + keys_.block_size());
    int64_t first = block_last, last = block_first;
    for (int64_t i = 0; i < count; ++i) {
      start_row(item, i, b, hk, first_row + i, block_first, block_last);
      if (item.first[i] >= item.last[i]) continue;
      first = std::min(first, item.first[i]);
      last = std::max(last, item.last[i]);
    }
    std::fill_n(item.o, count * width_, 0.0f);
    for (int64_t t = first, next; t < last; t = next) {
      next = std::min(last, (t / kTileKeys + 1) * kTileKeys);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = first_row + i;
        item.states[i].tile_score = keys_.tile_score(b, head_of(row, hk), query_of(row), t);
      }
      run_tile(item, count, b, hk, t, next - t);
    }
    for (int64_t i = 0; i < count; ++i) {
      store_row(item, i, b, head_of(first_row + i, hk), query_of(first_row + i), keys_.first_block() + block);
    }
  }

  void start_row(WorkItem& item, int64_t i, int64_t b, int64_t hk, int64_t row, int64_t block_first,
                 int64_t block_last) const {
    const int64_t head = head_of(row, hk), query = query_of(row), position = s_.q_offset + query;
    keys_.read_query(b, head, query, item.q + i * width_);
    item.states[i] = {.m = -std::numeric_limits<float>::infinity(), .l = 0};
    const auto& [starts, causal, q_offset, window] = visibility_;
    int64_t from = starts_.defined() ? std::max<int64_t>(0, starts_.template const_data_ptr<int64_t>()[b]) : 0;
    if (window > 0) from = std::max(from, position - window + 1);
    item.first[i] = std::max(block_first, keys_.index_of(from));
    item.last[i] = causal ? std::min(block_last, keys_.index_of(position + 1)) : block_last;
  }

  void run_tile(WorkItem& item, int64_t rows, int64_t b, int64_t hk, int64_t first, int64_t count) const {
    keys_.read_tile(b, hk, first, count, item, width_);
    const AuraTile tile{.q = item.q,
                        .keys = item.keys,
                        .values = item.values,
                        .rows = rows,
                        .count = count,
                        .width = width_,
                        .key_norms = item.key_norms,
                        .value_norms = item.value_norms,
                        .scores = item.scores,
                        .o = item.o,
                        .states = item.states};
    kernels_.dot_products(tile);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t from = std::clamp<int64_t>(item.first[i] - first, 0, count);
      const int64_t to = std::clamp<int64_t>(item.last[i] - first, from, count);
      if (from < to) kernels_.online_softmax(tile, i, from, to);
      if (from == to) std::fill_n(item.scores + i * kTileKeys, kTileKeys, 0.0f);
    }
    kernels_.add_weighted(tile);
  }

  void store_row(const WorkItem& item, int64_t i, int64_t b, int64_t head, int64_t query, int64_t block) const {
    const int64_t at = ((b * s_.HQ + head) * s_.L + query) * (s_.NB + s_.NX) + block;
    m_[at] = item.states[i].m;
    l_[at] = item.states[i].l;
    std::copy_n(item.o + i * width_, s_.D, o_ + at * s_.D);
  }

  const Keys& keys_;
  const Visibility<int64_t>& visibility_;
  const AuraShape<>& s_;
  int64_t ratio_, width_;
  const AuraKernels& kernels_ = aura_kernels();
  float *o_, *m_, *l_;
  Tensor starts_;
};

}  // namespace torch_gdn::cpu
