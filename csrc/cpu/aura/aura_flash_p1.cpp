#include <cmath>
#include <limits>

#include "cpu/aura/aura_flash.h"
#include "cpu/aura/codes.h"
#include "cpu/aura/vectors.h"
#include "cpu/define.h"

namespace torch_gdn::cpu {

namespace {

// A work item is a block of keys of one KV head and up to kFlashRows rows of its query heads, which share kTileKeys
// dequantised keys. Rows of a tile are `width` floats apart, D rounded up to whole kColumns.
constexpr int64_t kColumns = 32;
constexpr int64_t kKeysTogether = 16;  // at most, in a register of the kernels: they read that far past the last
constexpr float kNone = -std::numeric_limits<float>::infinity();

// What the rows of a work item carry from tile to tile.
struct WorkItem {
  std::vector<float> memory;
  float *q, *o, *keys, *values;  // [rows, width] and [keys_of_tile, width], two of each
  alignas(64) float scores[kFlashRows * kTileKeys];
  alignas(64) float key_norms[kTileKeys], key_means[kTileKeys], value_norms[kTileKeys], value_means[kTileKeys];
  AuraRow states[kFlashRows];
  int64_t first[kFlashRows], last[kFlashRows];  // keys that a row sees

  WorkItem(int64_t rows, int64_t keys_of_tile, int64_t width) : memory(2 * (rows + keys_of_tile) * width) {
    q = memory.data();
    o = q + rows * width;
    keys = o + rows * width;
    values = keys + keys_of_tile * width;
  }
};

class Pass1 {
 public:
  Pass1(const AuraFlashP1<int64_t>& op, const Partials& partials)
      : op_(op),
        s_(op.shape),
        ratio_(s_.HQ / s_.HK),
        width_(ceil_div(s_.D, kColumns) * kColumns),
        q_rot_(unit_last_stride(op.q_rot, "q_rot")),
        key_codes_(unit_last_stride(op.key.codes, "key_codes")),
        value_codes_(unit_last_stride(op.value.codes, "value_codes")),
        q_(q_rot_),
        keys_(op.key.codebook, s_.key_bits, s_.D),
        values_(op.value.codebook, s_.value_bits, s_.D) {
    const auto& [o, m, l, mean] = partials;
    o_ = o.mutable_data_ptr<float>();
    m_ = m.mutable_data_ptr<float>();
    l_ = l.mutable_data_ptr<float>();
    if (op.value.means.has_value()) mean_ = mean.mutable_data_ptr<float>();
    const auto& starts = op.visibility.starts;
    if (starts.has_value()) starts_ = starts->to(at::kLong).contiguous();
  }

  void run() const {
    const int64_t row_tiles = ceil_div(s_.L * ratio_, kFlashRows);
    const int64_t keys_of_tile = std::min(kTileKeys, ceil_div(s_.T, kKeysTogether) * kKeysTogether);
    at::parallel_for(0, s_.B * s_.HK * s_.NB * row_tiles, 1, [&](int64_t begin, int64_t end) {
      const auto item = std::make_unique<WorkItem>(std::min(kFlashRows, s_.L * ratio_), keys_of_tile, width_);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t tile = i % row_tiles, block = i / row_tiles % s_.NB, head = i / row_tiles / s_.NB;
        run_item(*item, head / s_.HK, head % s_.HK, block, tile * kFlashRows);
      }
    });
  }

 private:
  // Neighbouring rows are heads of one query, then the next query: they see nearly the same keys.
  int64_t query_of(int64_t row) const { return row / ratio_; }
  int64_t head_of(int64_t row, int64_t hk) const { return hk * ratio_ + row % ratio_; }

  void run_item(WorkItem& item, int64_t b, int64_t hk, int64_t block, int64_t first_row) const {
    const int64_t count = std::min(kFlashRows, s_.L * ratio_ - first_row);
    const int64_t block_first = block * op_.block_size, block_last = std::min(s_.T, block_first + op_.block_size);
    int64_t first = block_last, last = block_first;
    for (int64_t i = 0; i < count; ++i) {
      start_row(item, i, b, hk, first_row + i, block_first, block_last);
      if (item.first[i] >= item.last[i]) continue;
      first = std::min(first, item.first[i]);
      last = std::max(last, item.last[i]);
    }
    std::fill_n(item.o, count * width_, 0.0f);
    for (int64_t t = first; t < last; t += kTileKeys) run_tile(item, count, b, hk, t, std::min(kTileKeys, last - t));
    for (int64_t i = 0; i < count; ++i) {
      store_row(item, i, b, head_of(first_row + i, hk), query_of(first_row + i), block);
    }
  }

  void start_row(WorkItem& item, int64_t i, int64_t b, int64_t hk, int64_t row, int64_t block_first,
                 int64_t block_last) const {
    const int64_t head = head_of(row, hk), query = query_of(row), position = s_.q_offset + query;
    q_.read(b, head, query, 0, s_.D, item.q + i * width_);
    const float q_sum = op_.q_sums.has_value() ? value_at(*op_.q_sums, b, head, query) : 0.0f;
    item.states[i] = {.m = kNone, .l = 0, .mean = 0, .q_sum = q_sum};
    item.first[i] = block_first;
    item.last[i] = block_last;
    const auto& visibility = op_.visibility;
    if (starts_.defined()) item.first[i] = std::max(item.first[i], starts_.const_data_ptr<int64_t>()[b]);
    if (visibility.window > 0) item.first[i] = std::max(item.first[i], position - visibility.window + 1);
    if (visibility.causal) item.last[i] = std::min(item.last[i], position + 1);
  }

  void run_tile(WorkItem& item, int64_t rows, int64_t b, int64_t hk, int64_t first, int64_t count) const {
    keys_.dequantise(words_at(key_codes_, b, hk, first), key_codes_.stride(2), count, item.keys, width_);
    values_.dequantise(words_at(value_codes_, b, hk, first), value_codes_.stride(2), count, item.values, width_);
    read_values(op_.key.norms, b, hk, first, count, item.key_norms);
    read_values(op_.value.norms, b, hk, first, count, item.value_norms);
    read_values(op_.key.means, b, hk, first, count, item.key_means);
    read_values(op_.value.means, b, hk, first, count, item.value_means);
    const AuraTile tile{.q = item.q,
                        .keys = item.keys,
                        .values = item.values,
                        .rows = rows,
                        .count = count,
                        .width = width_,
                        .key_norms = item.key_norms,
                        .key_means = item.key_means,
                        .value_norms = item.value_norms,
                        .value_means = item.value_means,
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
    const int64_t at = ((b * s_.HQ + head) * s_.L + query) * s_.NB + block;
    m_[at] = item.states[i].m;
    l_[at] = item.states[i].l;
    if (mean_ != nullptr) mean_[at] = item.states[i].mean;
    std::copy_n(item.o + i * width_, s_.D, o_ + at * s_.D);
  }

  // Norms or means of some keys; zeros without a tensor.
  static void read_values(const optional<Tensor>& x, int64_t b, int64_t h, int64_t first, int64_t count, float* out) {
    if (!x.has_value()) return std::fill(out, out + count, 0.0f), void();
    const float* in = x->const_data_ptr<float>() + offset_of(*x, b, h, first);
    for (int64_t t = 0; t < count; ++t) out[t] = in[t * x->stride(2)];
  }

  const AuraFlashP1<int64_t>& op_;
  const AuraShape<>& s_;
  int64_t ratio_, width_;
  Tensor q_rot_, key_codes_, value_codes_;
  Rows q_;
  Codebook keys_, values_;
  const AuraKernels& kernels_ = aura_kernels();
  float *o_, *m_, *l_, *mean_ = nullptr;
  Tensor starts_;
};

}  // namespace

void flash_p1(const AuraFlashP1<int64_t>& op, const Partials& partials) {
  if (std::get<1>(partials).numel() > 0) Pass1(op, partials).run();
}

TORCH_LIBRARY_FRAGMENT(gdn, m) { define<AuraFlashP1, &flash_p1>(m); }

}  // namespace torch_gdn::cpu
