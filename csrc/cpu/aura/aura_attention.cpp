// Attention to codes takes two passes: pass 1 computes a softmax over each block of keys, and pass 2 merges the blocks.
// Attention to exact rows runs between them, as pass 1 of further blocks.
#include <cmath>

#include "cpu/attention/tiles.h"
#include "cpu/aura/codes.h"
#include "cpu/aura/vectors.h"
#include "cpu/define.h"
#include "ops/aura/attention.h"

namespace torch_gdn::cpu {

namespace {

constexpr int64_t kWorkItems = 32;     // if there are enough keys: two for each core of a large desktop
constexpr int64_t kKeysTogether = 16;  // at most, in a register of the kernels, which read that far past the last key

// Pass 1. A work item is a block of keys of one KV head and up to kRowsOfTile rows of its query heads. `Keys` reads
// keys and values as f32. It has:
//   blocks(), first_block()            the number of its blocks, and the first one's index among a row's partials
//   count(), block_size()              the number of keys, and of keys per block
//   index_of(position)                 the index of the first key at a position or after it
//   read_query(b, head, query, row)    reads q, rotated like the keys and scaled
//   tile_score(b, head, query, key)    what is added to a score, the same for the keys of a tile
//   read_tile(b, hk, first, count, tile)    reads `count` keys and values into the tile
template <typename Keys>
class Pass1 {
 public:
  Pass1(const Keys& keys, const Visibility<int64_t>& visibility, const AuraShape<>& shape, const Partials& partials)
      : keys_(keys), visibility_(visibility), s_(shape), ratio_(s_.HQ / s_.HK) {
    const auto& [o, m, l] = partials;
    o_ = o.template mutable_data_ptr<float>();
    m_ = m.template mutable_data_ptr<float>();
    l_ = l.template mutable_data_ptr<float>();
    if (visibility.starts.has_value()) starts_.emplace(*visibility.starts);
  }

  void run() const {
    const int64_t rows = s_.L * ratio_, row_tiles = ceil_div(rows, kRowsOfTile), blocks = keys_.blocks();
    // Tiles begin at multiples of kTileKeys.
    const int64_t keys_of_tile = std::min(kTileKeys, ceil_div(keys_.count(), kKeysTogether) * kKeysTogether);
    at::parallel_for(0, s_.B * s_.HK * blocks * row_tiles, 1, [&](int64_t begin, int64_t end) {
      const auto tile = std::make_unique<AttentionTile>(s_.D, std::min(kRowsOfTile, rows), keys_of_tile);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t block = i / row_tiles % blocks, head = i / row_tiles / blocks;
        run_item(*tile, head / s_.HK, head % s_.HK, block, i % row_tiles * kRowsOfTile);
      }
    });
  }

 private:
  // Adjacent rows are the heads of one query, so they see the same keys or nearly the same.
  int64_t query_of(int64_t row) const { return row / ratio_; }
  int64_t head_of(int64_t row, int64_t hk) const { return hk * ratio_ + row % ratio_; }

  void run_item(AttentionTile& tile, int64_t b, int64_t hk, int64_t block, int64_t first_row) const {
    const int64_t count = std::min(kRowsOfTile, s_.L * ratio_ - first_row);
    const int64_t block_first = block * keys_.block_size();
    const int64_t block_last = std::min(keys_.count(), block_first + keys_.block_size());
    int64_t first = block_last, last = block_first;
    SeenKeys seen[kRowsOfTile];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = first_row + i;
      keys_.read_query(b, head_of(row, hk), query_of(row), tile.q.data() + i * tile.width);
      tile.states[i] = {.m = kNoScore, .l = 0};
      seen[i] = seen_by(b, query_of(row), block_first, block_last);
      if (seen[i].first >= seen[i].last) continue;
      first = std::min(first, seen[i].first);
      last = std::max(last, seen[i].last);
    }
    std::fill_n(tile.o.begin(), count * tile.width, 0.0f);
    for (int64_t t = first, next; t < last; t = next) {
      next = std::min(last, (t / kTileKeys + 1) * kTileKeys);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = first_row + i;
        tile.states[i].tile_score = keys_.tile_score(b, head_of(row, hk), query_of(row), t);
      }
      keys_.read_tile(b, hk, t, next - t, tile);
      tile.attend(count, t, next - t, [&](int64_t i) { return seen[i]; });
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = (b * s_.HQ + head_of(first_row + i, hk)) * s_.L + query_of(first_row + i);
      const int64_t at = row * (s_.NB + s_.NX) + keys_.first_block() + block;
      m_[at] = tile.states[i].m;
      l_[at] = tile.states[i].l;
      std::copy_n(tile.o.data() + i * tile.width, s_.D, o_ + at * s_.D);
    }
  }

  // Returns the keys of a block that a query sees.
  SeenKeys seen_by(int64_t b, int64_t query, int64_t block_first, int64_t block_last) const {
    const int64_t position = s_.q_offset + query, window = visibility_.window;
    int64_t from = starts_ ? std::max<int64_t>(0, (*starts_)[b]) : 0;
    if (window > 0) from = std::max(from, position - window + 1);
    return {std::max(block_first, keys_.index_of(from)),
            visibility_.causal ? std::min(block_last, keys_.index_of(position + 1)) : block_last};
  }

  const Keys& keys_;
  const Visibility<int64_t>& visibility_;
  const AuraShape<>& s_;
  int64_t ratio_;
  float *o_, *m_, *l_;
  optional<Indices> starts_;
};

class CodedKeys {
 public:
  explicit CodedKeys(const AuraFlashP1<int64_t>& op)
      : op_(op),
        key_codes_(unit_last_stride(op.key.codes, "key_codes")),
        value_codes_(unit_last_stride(op.value.codes, "value_codes")),
        tile_scores_(op.tile_scores.has_value() ? op.tile_scores->contiguous() : Tensor()),
        q_(op.q_rot, "q_rot"),
        keys_(op.key.codebook, op.shape.key_code, op.shape.D),
        values_(op.value.codebook, op.shape.value_code, op.shape.D) {}

  int64_t blocks() const { return op_.shape.NB; }
  int64_t first_block() const { return 0; }
  int64_t count() const { return op_.shape.T; }
  int64_t block_size() const { return op_.block_size; }
  int64_t index_of(int64_t position) const { return position - op_.shape.S; }

  void read_query(int64_t b, int64_t head, int64_t query, float* row) const { q_.read(b, head, query, row); }

  float tile_score(int64_t b, int64_t head, int64_t query, int64_t key) const {
    static_assert(kTokensOfTile % kTileKeys == 0, "the keys that are read together are in one tile");
    if (!tile_scores_.defined()) return 0.0f;
    return tile_scores_.const_data_ptr<float>()[offset_of(tile_scores_, b, head, query) + key / kTokensOfTile];
  }

  void read_tile(int64_t b, int64_t hk, int64_t first, int64_t count, AttentionTile& tile) const {
    keys_.dequantise(words_at(key_codes_, b, hk, first), key_codes_.stride(2), count, tile.keys.data(), tile.width);
    values_.dequantise(words_at(value_codes_, b, hk, first), value_codes_.stride(2), count, tile.values.data(),
                       tile.width);
    for (int64_t i = 0; i < count; ++i) {
      tile.key_norms[i] = norm_at(op_.key.norms, b, hk, first + i);
      tile.value_norms[i] = norm_at(op_.value.norms, b, hk, first + i);
    }
  }

 private:
  const AuraFlashP1<int64_t>& op_;
  Tensor key_codes_, value_codes_, tile_scores_;  // the last is undefined if keys have no means of tiles
  Rows q_;
  Codebook keys_, values_;
};

// Reads exact rows. Neither they nor q are rotated, so the partial sums of o are not rotated either.
class ExactKeys {
 public:
  ExactKeys(const AuraAttention<int64_t>& op, const AuraShape<>& shape, int64_t block_size)
      : s_(shape),
        block_size_(block_size),
        scale_(static_cast<float>(scale_or_default(op.scale, shape.D))),
        q_(op.q, "q"),
        keys_(*op.exact.keys, "exact_keys"),
        values_(*op.exact.values, "exact_values") {}

  int64_t blocks() const { return s_.NX; }
  int64_t first_block() const { return s_.NB; }
  int64_t count() const { return s_.E; }
  int64_t block_size() const { return block_size_; }
  int64_t index_of(int64_t position) const { return position <= s_.S ? position : std::max(s_.S, position - s_.T); }

  void read_query(int64_t b, int64_t head, int64_t query, float* row) const {
    q_.read(b, head, query, row);
    for (int64_t d = 0; d < s_.D; ++d) row[d] *= scale_;
  }

  float tile_score(int64_t, int64_t, int64_t, int64_t) const { return 0.0f; }

  void read_tile(int64_t b, int64_t hk, int64_t first, int64_t count, AttentionTile& tile) const {
    for (int64_t i = 0; i < count; ++i) {
      keys_.read(b, hk, first + i, tile.keys.data() + i * tile.width);
      values_.read(b, hk, first + i, tile.values.data() + i * tile.width);
    }
    for (float* norms : {tile.key_norms, tile.value_norms}) std::fill_n(norms, count, 1.0f);
  }

 private:
  const AuraShape<>& s_;
  int64_t block_size_;
  float scale_;
  Rows q_, keys_, values_;
};

void flash_p1(const AuraFlashP1<int64_t>& op, const Partials& partials) {
  if (std::get<1>(partials).numel() == 0 || op.shape.NB == 0) return;
  Pass1(CodedKeys(op), op.visibility, op.shape, partials).run();
}

// Sets the factor of each block of a row, exp(m - the largest m). Returns the sum of l, each times its block's factor.
// A sink is a score without a value.
float merge(const float* m, const float* l, const float* sink, std::vector<float>& factors) {
  float largest = sink != nullptr ? *sink : kNoScore, sum = 0;
  for (size_t i = 0; i < factors.size(); ++i) largest = std::max(largest, m[i]);
  for (size_t i = 0; i < factors.size(); ++i) {
    factors[i] = l[i] == 0.0f ? 0.0f : std::exp(m[i] - largest);
    sum += factors[i] * l[i];
  }
  if (sink != nullptr) sum += std::exp(*sink - largest);
  return sum;
}

void flash_p2(const AuraFlashP2<int64_t>& op, const Tensor& o) {
  if (o.numel() == 0) return;
  const auto& s = op.shape;
  const Tensor parts = op.o_partials.contiguous(), m = op.m_partials.contiguous(), l = op.l_partials.contiguous();
  const Tensor sinks = op.sinks.has_value() ? op.sinks->contiguous() : Tensor();
  const Tensor signs = op.value_signs.contiguous();
  const Rows out(o);
  const int64_t blocks = s.NB + s.NX;
  at::parallel_for(0, s.B * s.HQ * s.L, 16, [&](int64_t begin, int64_t end) {
    float row[kLargestD];
    std::vector<float> factors(blocks);
    const auto add_blocks = [&](int64_t at, int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        if (factors[block] == 0.0f) continue;
        const float* part = parts.const_data_ptr<float>() + (at + block) * s.D;
        for (int64_t d = 0; d < s.D; ++d) row[d] += factors[block] * part[d];
      }
    };
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / s.L % s.HQ, at = i * blocks;
      const float sum = merge(m.const_data_ptr<float>() + at, l.const_data_ptr<float>() + at,
                              sinks.defined() ? sinks.const_data_ptr<float>() + head : nullptr, factors);
      std::fill_n(row, s.D, 0.0f);
      add_blocks(at, 0, s.NB);
      rotate(row, signs, true, inverse_root(s.D));
      add_blocks(at, s.NB, blocks);
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // a row that saw no key has the result 0
      for (int64_t d = 0; d < s.D; ++d) row[d] *= inverse;
      out.write(i / s.L / s.HQ, head, i % s.L, row);
    }
  });
}

// Returns scale q . means, [B, HQ, L, tiles]. A work item has some tiles of one KV head and some rows of q that read
// them.
optional<Tensor> tile_scores(const AuraAttention<int64_t>& op) {
  const auto& s = op.shape;
  if (!op.key.tile_means.has_value()) return std::nullopt;
  constexpr int64_t kRows = kRowsOfTile, kTiles = kTileKeys;
  const int64_t ratio = s.HQ / s.HK, tiles = tiles_of(s.T);
  const Tensor scores = at::empty({s.B, s.HQ, s.L, tiles}, op.q.options().dtype(at::kFloat));
  const Rows query_rows(op.q, "q"), mean_rows(*op.key.tile_means, "key_tile_means");
  const float scale = static_cast<float>(scale_or_default(op.scale, s.D));
  const int64_t row_parts = ceil_div(s.L * ratio, kRows), tile_parts = ceil_div(tiles, kTiles);
  at::parallel_for(0, s.B * s.HK * tile_parts * row_parts, 4, [&](int64_t begin, int64_t end) {
    std::vector<float> memory((kRows + kTiles) * s.D);
    float *queries = memory.data(), *vectors = queries + kRows * s.D, products[kRows * kTiles];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / row_parts / tile_parts / s.HK, hk = i / row_parts / tile_parts % s.HK;
      const int64_t first_row = i % row_parts * kRows, rows = std::min(kRows, s.L * ratio - first_row);
      const int64_t first = i / row_parts % tile_parts * kTiles, count = std::min(kTiles, tiles - first);
      for (int64_t t = 0; t < count; ++t) mean_rows.read(b, hk, first + t, vectors + t * s.D);
      for (int64_t r = 0; r < rows; ++r) {
        query_rows.read(b, hk * ratio + (first_row + r) % ratio, (first_row + r) / ratio, queries + r * s.D);
      }
      aura_kernels().dot_products(
          {.q = queries, .keys = vectors, .rows = rows, .count = count, .width = s.D, .scores = products});
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t head = hk * ratio + (first_row + r) % ratio;
        float* out = scores.mutable_data_ptr<float>() + offset_of(scores, b, head, (first_row + r) / ratio) + first;
        for (int64_t t = 0; t < count; ++t) out[t] = scale * products[r * kTiles + t];
      }
    }
  });
  return scores;
}

// Returns scale Pi q, [B, HQ, L, D].
Tensor rotate_query(const AuraAttention<int64_t>& op) {
  const auto& s = op.shape;
  const Tensor signs = op.key_signs.contiguous();
  const Tensor rotated = at::empty({s.B, s.HQ, s.L, s.D}, op.q.options().dtype(at::kFloat));
  const Rows in(op.q, "q"), out(rotated);
  const float factor = static_cast<float>(scale_or_default(op.scale, s.D)) / std::sqrt(static_cast<float>(s.D));
  for_each_vector(rotated, [&](int64_t b, int64_t head, int64_t token) {
    float row[kLargestD];
    in.read(b, head, token, row);
    rotate(row, signs, false, factor);
    out.write(b, head, token, row);
  });
  return rotated;
}

void run(const AuraAttention<int64_t>& op, const Tensor& o) {
  if (o.numel() == 0) return;
  const auto& s = op.shape;
  const int64_t groups = s.B * s.HK * ceil_div(s.L * s.HQ / s.HK, kRowsOfTile);
  const int64_t block_size = op.block_size.value_or(default_block_size(s.T, kTileKeys, groups, kWorkItems));
  const int64_t exact_rows = default_block_size(s.E, kTileKeys, groups, kWorkItems);
  const Tensor q_rot = rotate_query(op);
  const auto pass_1 = op.pass_1(q_rot, tile_scores(op), block_size, exact_rows);
  const auto partials = pass_1.partials(q_rot.options());
  flash_p1(pass_1, partials);
  if (pass_1.shape.NX > 0) {
    Pass1(ExactKeys(op, pass_1.shape, exact_rows), op.visibility, pass_1.shape, partials).run();
  }
  flash_p2(op.pass_2(pass_1, partials), o);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  define<AuraFlashP1, &flash_p1>(m);
  define<AuraFlashP2, &flash_p2>(m);
  define<AuraAttention, &run>(m);
}

}  // namespace torch_gdn::cpu
