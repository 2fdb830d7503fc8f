#include <torch/library.h>

#include <cmath>
#include <limits>

#include "cpu/aura/aura_flash.h"

namespace torch_gdn {
namespace cpu {
namespace {

// A work_item of work is a block of keys of one KV head and up to kRows rows of its query heads, which share the centroids
// that kTileKeys keys are looked up as. Rows of a tile are `width` floats apart, D rounded up to whole kColumns.
constexpr int64_t kColumns = 32;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// What the rows of a work_item carry from tile to tile.
struct Rows32 {
  std::vector<float> q, keys, values, o;
  alignas(64) float scores[kRows * kTileKeys];
  alignas(64) float key_norms[kTileKeys], key_means[kTileKeys], value_norms[kTileKeys], value_means[kTileKeys];
  AuraRow states[kRows];
  int64_t first[kRows], last[kRows];  // keys that a row sees

  explicit Rows32(int64_t width)
      : q(kRows * width), keys(kTileKeys * width), values(kTileKeys * width), o(kRows * width) {}
};

class Pass1 {
 public:
  Pass1(const AuraShape& s, const Tensor& q_rot, const optional<Tensor>& q_sums, const Cache& cache,
        const Visibility& visibility, const Partials& partials)
      : s_(s),
        ratio_(s.HQ / s.HK),
        width_(ceil_div(s.D, kColumns) * kColumns),
        q_(q_rot),
        q_sums_(q_sums),
        cache_(cache),
        visibility_(visibility),
        partials_(partials),
        keys_(cache.key_codebook, s.key_bits, s.D),
        values_(cache.value_codebook, s.value_bits, s.D) {
    if (visibility.starts.has_value()) starts_ = visibility.starts->to(at::kLong).contiguous();
  }

  void run() const {
    const int64_t row_tiles = ceil_div(s_.L * ratio_, kRows);
    at::parallel_for(0, s_.B * s_.HK * s_.NB * row_tiles, 1, [&](int64_t begin, int64_t end) {
      const auto rows = std::make_unique<Rows32>(width_);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t tile = i % row_tiles, block = i / row_tiles % s_.NB, head = i / row_tiles / s_.NB;
        work_item(*rows, head / s_.HK, head % s_.HK, block, tile * kRows);
      }
    });
  }

 private:
  // Neighbouring rows are heads of one query, then the next query: they see nearly the same keys.
  int64_t query_of(int64_t row) const { return row / ratio_; }
  int64_t head_of(int64_t row, int64_t hk) const { return hk * ratio_ + row % ratio_; }

  void work_item(Rows32& r, int64_t b, int64_t hk, int64_t block, int64_t first_row) const {
    const int64_t count = std::min(kRows, s_.L * ratio_ - first_row);
    const int64_t block_first = block * s_.block_size, block_last = std::min(s_.T, block_first + s_.block_size);
    int64_t first = block_last, last = block_first;
    for (int64_t i = 0; i < count; ++i) {
      start_row(r, i, b, hk, first_row + i, block_first, block_last);
      if (r.first[i] >= r.last[i]) continue;
      first = std::min(first, r.first[i]);
      last = std::max(last, r.last[i]);
    }
    std::fill(r.o.begin(), r.o.end(), 0.0f);
    for (int64_t t = first; t < last; t += kTileKeys) tile(r, count, b, hk, t, std::min(kTileKeys, last - t));
    for (int64_t i = 0; i < count; ++i) store_row(r, i, b, head_of(first_row + i, hk), query_of(first_row + i), block);
  }

  void start_row(Rows32& r, int64_t i, int64_t b, int64_t hk, int64_t row, int64_t block_first,
                 int64_t block_last) const {
    const int64_t head = head_of(row, hk), query = query_of(row), position = s_.q_offset + query;
    q_.read(b, head, query, 0, s_.D, r.q.data() + i * width_);
    const float q_sum =
        q_sums_.has_value() ? q_sums_->const_data_ptr<float>()[place_of(*q_sums_, b, head, query)] : 0.0f;
    r.states[i] = {.m = kNone, .l = 0, .mean = 0, .q_sum = q_sum};
    r.first[i] = block_first;
    r.last[i] = block_last;
    if (starts_.defined()) r.first[i] = std::max(r.first[i], starts_.const_data_ptr<int64_t>()[b]);
    if (visibility_.window > 0) r.first[i] = std::max(r.first[i], position - visibility_.window + 1);
    if (visibility_.causal) r.last[i] = std::min(r.last[i], position + 1);
  }

  void tile(Rows32& r, int64_t rows, int64_t b, int64_t hk, int64_t first, int64_t count) const {
    keys_.dequantise(words_at(cache_.key_codes, b, hk, first), cache_.key_codes.stride(2), count, r.keys.data(), width_);
    values_.dequantise(words_at(cache_.value_codes, b, hk, first), cache_.value_codes.stride(2), count, r.values.data(),
                    width_);
    read_column(cache_.key_norms, b, hk, first, count, r.key_norms);
    read_column(cache_.value_norms, b, hk, first, count, r.value_norms);
    read_column(cache_.key_means, b, hk, first, count, r.key_means);
    read_column(cache_.value_means, b, hk, first, count, r.value_means);
    const AuraTile tile{r.q.data(),  r.keys.data(), r.values.data(), rows,     count,      width_,  r.key_norms,
                        r.key_means, r.value_norms, r.value_means,   r.scores, r.o.data(), r.states};
    kernels_.dot_products(tile);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t from = std::clamp<int64_t>(r.first[i] - first, 0, count);
      const int64_t to = std::clamp<int64_t>(r.last[i] - first, from, count);
      if (from < to) kernels_.online_softmax(tile, i, from, to);
      if (from == to) std::fill_n(r.scores + i * kTileKeys, kTileKeys, 0.0f);
    }
    kernels_.add_weighted(tile);
  }

  void store_row(const Rows32& r, int64_t i, int64_t b, int64_t head, int64_t query, int64_t block) const {
    const int64_t at = ((b * s_.HQ + head) * s_.L + query) * s_.NB + block;
    partials_.m.mutable_data_ptr<float>()[at] = r.states[i].m;
    partials_.l.mutable_data_ptr<float>()[at] = r.states[i].l;
    if (cache_.value_means.has_value()) partials_.mean.mutable_data_ptr<float>()[at] = r.states[i].mean;
    std::copy_n(r.o.data() + i * width_, s_.D, partials_.o.mutable_data_ptr<float>() + at * s_.D);
  }

  static void read_column(const optional<Tensor>& x, int64_t b, int64_t h, int64_t first, int64_t count, float* out) {
    if (!x.has_value()) return std::fill(out, out + count, 0.0f), void();
    const float* in = x->const_data_ptr<float>() + place_of(*x, b, h, first);
    for (int64_t t = 0; t < count; ++t) out[t] = in[t * x->stride(2)];
  }

  const AuraShape& s_;
  int64_t ratio_, width_;
  Rows q_;
  const optional<Tensor>& q_sums_;
  const Cache& cache_;
  const Visibility& visibility_;
  const Partials& partials_;
  Codebook keys_, values_;
  const AuraKernels& kernels_ = aura_kernels();
  Tensor starts_;
};

}  // namespace

Partials new_partials(const AuraShape& s, const Tensor& like, bool with_means) {
  const auto f32 = like.options().dtype(at::kFloat);
  const std::vector<int64_t> sizes = {s.B, s.HQ, s.L, s.NB};
  const Tensor mean = with_means ? at::empty(sizes, f32) : at::empty({0}, f32);
  return {at::empty({s.B, s.HQ, s.L, s.NB, s.D}, f32), at::empty(sizes, f32), at::empty(sizes, f32), mean};
}

void flash_p1(const AuraShape& s, const Tensor& q_rot, const optional<Tensor>& q_sums, const Cache& cache,
              const Visibility& visibility, const Partials& partials) {
  if (partials.m.numel() > 0) Pass1(s, q_rot, q_sums, cache, visibility, partials).run();
}

}  // namespace cpu

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> aura_flash_p1(
    const Tensor& q_rot, const Tensor& key_codes, const Tensor& key_norms, const Tensor& key_codebook,
    const Tensor& value_codes, const Tensor& value_norms, const Tensor& value_codebook,
    const optional<Tensor>& key_means, const optional<Tensor>& q_sums, const optional<Tensor>& value_means,
    const optional<Tensor>& starts, bool causal, optional<int64_t> q_offset, int64_t window, int64_t block_size) {
  const auto s =
      check_aura_flash_p1(q_rot, key_codes, key_norms, key_codebook, value_codes, value_norms, value_codebook,
                          key_means, q_sums, value_means, starts, causal, q_offset, window, block_size);
  const cpu::Cache cache{unit_last_stride(key_codes, "key_codes"),
                         key_norms,
                         key_codebook,
                         unit_last_stride(value_codes, "value_codes"),
                         value_norms,
                         value_codebook,
                         key_means,
                         value_means};
  const auto partials = cpu::new_partials(s, q_rot, value_means.has_value());
  cpu::flash_p1(s, unit_last_stride(q_rot, "q_rot"), q_sums, cache, {starts, causal, window}, partials);
  return {partials.o, partials.m, partials.l, partials.mean};
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) { m.impl("aura_flash_p1", &aura_flash_p1); }

}  // namespace torch_gdn
