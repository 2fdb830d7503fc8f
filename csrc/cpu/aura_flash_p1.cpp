#include <torch/library.h>

#include <bit>
#include <cmath>
#include <limits>

#include "aura_flash.h"

namespace torch_gdn {
namespace cpu {
namespace {

// A piece of work is a block of keys of one KV head and up to kRows rows of its query heads, which share the centroids
// that kTileKeys keys are looked up as. Rows of a tile are `width` floats apart, D rounded up to whole kColumns.
constexpr int64_t kColumns = 32;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// scores[row][key] = q[row] . keys[key]. Inlined, so that it is compiled for the caller's generation of x86.
template <int kTogether>
[[gnu::always_inline]] inline void dot_rows(const float* q, const float* keys, int64_t count, int64_t width,
                                            float* scores) {
  for (int64_t t = 0; t < count; ++t) {
    alignas(64) float sums[kTogether][kColumns] = {};
    for (int64_t d = 0; d < width; d += kColumns) {
      for (int row = 0; row < kTogether; ++row) {
#pragma omp simd
        for (int64_t j = 0; j < kColumns; ++j) sums[row][j] += q[row * width + d + j] * keys[t * width + d + j];
      }
    }
    for (int row = 0; row < kTogether; ++row) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < kColumns; ++j) sum += sums[row][j];
      scores[row * kTileKeys + t] = sum;
    }
  }
}

TORCH_GDN_VECTORISED void dot_products(const float* q, int64_t rows, const float* keys, int64_t count, int64_t width,
                                       float* scores) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) dot_rows<4>(q + row * width, keys, count, width, scores + row * kTileKeys);
  for (; row < rows; ++row) dot_rows<1>(q + row * width, keys, count, width, scores + row * kTileKeys);
}

// o[row] += sum over keys of weights[row][key] values[key]
template <int kTogether>
[[gnu::always_inline]] inline void add_rows(const float* weights, const float* values, int64_t count, int64_t width,
                                            float* o) {
  for (int64_t d = 0; d < width; d += kColumns) {
    alignas(64) float sums[kTogether][kColumns] = {};
    for (int64_t t = 0; t < count; ++t) {
      for (int row = 0; row < kTogether; ++row) {
#pragma omp simd
        for (int64_t j = 0; j < kColumns; ++j) sums[row][j] += weights[row * kTileKeys + t] * values[t * width + d + j];
      }
    }
    for (int row = 0; row < kTogether; ++row) {
#pragma omp simd
      for (int64_t j = 0; j < kColumns; ++j) o[row * width + d + j] += sums[row][j];
    }
  }
}

TORCH_GDN_VECTORISED void add_weighted(const float* weights, int64_t rows, const float* values, int64_t count,
                                       int64_t width, float* o) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) add_rows<4>(weights + row * kTileKeys, values, count, width, o + row * width);
  for (; row < rows; ++row) add_rows<1>(weights + row * kTileKeys, values, count, width, o + row * width);
}

// x[i] <- exp(x[i] - largest), no x above the largest; 2^n exp(r) with |r| <= ln(2) / 2 and r^7 the last term: 1 ulp.
TORCH_GDN_VECTORISED void exponentials(float* x, int64_t count, float largest) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float difference = x[i] - largest;
    const float y = difference < -87.0f ? -87.0f : difference;
    const float shifted = y * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: its last bits are the rounded number
    const float n = shifted - 12582912.0f;
    const float r = (y - n * 0.693145752f) - n * 1.42860677e-6f;
    float series = 1.0f / 5040.0f;
    series = series * r + 1.0f / 720.0f;
    series = series * r + 1.0f / 120.0f;
    series = series * r + 1.0f / 24.0f;
    series = series * r + 1.0f / 6.0f;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    const float power = std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) + 127u) << 23);
    x[i] = difference < -87.0f ? 0.0f : series * power;
  }
}

// What the rows of a piece carry from tile to tile.
struct Rows32 {
  std::vector<float> q, keys, values, o;
  alignas(64) float scores[kRows * kTileKeys];
  alignas(64) float key_norms[kTileKeys], key_means[kTileKeys], value_norms[kTileKeys], value_means[kTileKeys];
  float m[kRows], l[kRows], mean[kRows], q_sum[kRows];
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
        piece(*rows, head / s_.HK, head % s_.HK, block, tile * kRows);
      }
    });
  }

 private:
  // Neighbouring rows are heads of one query, then the next query: they see nearly the same keys.
  int64_t query_of(int64_t row) const { return row / ratio_; }
  int64_t head_of(int64_t row, int64_t hk) const { return hk * ratio_ + row % ratio_; }

  void piece(Rows32& r, int64_t b, int64_t hk, int64_t block, int64_t first_row) const {
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
    r.m[i] = kNone;
    r.l[i] = r.mean[i] = 0;
    r.q_sum[i] = q_sums_.has_value() ? q_sums_->const_data_ptr<float>()[place_of(*q_sums_, b, head, query)] : 0.0f;
    r.first[i] = block_first;
    r.last[i] = block_last;
    if (starts_.defined()) r.first[i] = std::max(r.first[i], starts_.const_data_ptr<int64_t>()[b]);
    if (visibility_.window > 0) r.first[i] = std::max(r.first[i], position - visibility_.window + 1);
    if (visibility_.causal) r.last[i] = std::min(r.last[i], position + 1);
  }

  void tile(Rows32& r, int64_t rows, int64_t b, int64_t hk, int64_t first, int64_t count) const {
    for (int64_t t = 0; t < count; ++t) {
      keys_.look_up(words_at(cache_.key_codes, b, hk, first + t), r.keys.data() + t * width_);
      values_.look_up(words_at(cache_.value_codes, b, hk, first + t), r.values.data() + t * width_);
    }
    read_column(cache_.key_norms, b, hk, first, count, r.key_norms);
    read_column(cache_.value_norms, b, hk, first, count, r.value_norms);
    read_column(cache_.key_means, b, hk, first, count, r.key_means);
    read_column(cache_.value_means, b, hk, first, count, r.value_means);
    dot_products(r.q.data(), rows, r.keys.data(), count, width_, r.scores);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t from = std::clamp<int64_t>(r.first[i] - first, 0, count);
      weigh(r, i, from, std::clamp<int64_t>(r.last[i] - first, from, count), count);
    }
    add_weighted(r.scores, rows, r.values.data(), count, width_, r.o.data());
  }

  // From dot products of one row to weights that its values' centroids are multiplied by. Keys that the row does not
  // see, all but those in [from, to), get weight 0 even where their norm is not finite.
  void weigh(Rows32& r, int64_t i, int64_t from, int64_t to, int64_t count) const {
    float* scores = r.scores + i * kTileKeys;
    std::fill(scores, scores + from, 0.0f);
    std::fill(scores + to, scores + count, 0.0f);
    if (from == to) return;
    for (int64_t t = from; t < to; ++t) scores[t] = scores[t] * r.key_norms[t] + r.q_sum[i] * r.key_means[t];
    float largest = r.m[i];
    for (int64_t t = from; t < to; ++t) largest = scores[t] > largest ? scores[t] : largest;
    if (largest == kNone) largest = std::numeric_limits<float>::lowest();  // every score is -inf or NaN
    float decay = r.m[i];
    exponentials(&decay, 1, largest);
    rescale(r, i, decay);
    exponentials(scores + from, to - from, largest);
    for (int64_t t = from; t < to; ++t) {
      r.l[i] += scores[t];
      r.mean[i] += scores[t] * r.value_means[t];
      scores[t] *= r.value_norms[t];
    }
    r.m[i] = largest;
  }

  void rescale(Rows32& r, int64_t i, float decay) const {
    if (decay == 1.0f) return;
    r.l[i] *= decay;
    r.mean[i] *= decay;
    for (int64_t d = 0; d < width_; ++d) r.o[i * width_ + d] *= decay;
  }

  void store_row(const Rows32& r, int64_t i, int64_t b, int64_t head, int64_t query, int64_t block) const {
    const int64_t at = ((b * s_.HQ + head) * s_.L + query) * s_.NB + block;
    partials_.m.mutable_data_ptr<float>()[at] = r.m[i];
    partials_.l.mutable_data_ptr<float>()[at] = r.l[i];
    if (cache_.value_means.has_value()) partials_.mean.mutable_data_ptr<float>()[at] = r.mean[i];
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
