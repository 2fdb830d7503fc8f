#include <cmath>

#include "cpu/attention/attention.h"
#include "cpu/aura/codes.h"
#include "cpu/aura/vectors.h"
#include "cpu/define.h"
#include "ops/aura/pages.h"

namespace torch_gdn::cpu {

namespace {

// Which tokens are exact, and their rows.
class ExactTokens {
 public:
  ExactTokens(const PagedShape<>& shape, const PagedSequences<int64_t>& sequences, const PagedExactRows<int64_t>& exact)
      : exact_(exact),
        boundaries_(sequences.cu_seqlens),
        lengths_(sequences.seq_lens),
        slots_(*exact.slots),
        starts_(*exact.starts),
        sink_slots_(*exact.sink_slots),
        keys_(*exact.keys),
        values_(*exact.values),
        new_keys_(exact.new_keys->unsqueeze(0)),
        new_values_(exact.new_values->unsqueeze(0)) {}

  // Returns false, and reads nothing, if the token has codes alone.
  bool read(const paged::Token& token, int64_t head, bool is_key, float* row) const {
    const int64_t n = token.sequence, p = token.position;
    const int64_t first_query = lengths_[n] - (boundaries_[n + 1] - boundaries_[n]);
    if (p >= first_query) {
      (is_key ? new_keys_ : new_values_).read(0, boundaries_[n] + p - first_query, head, row);
      return true;
    }
    const bool is_sink = p < exact_.sinks;
    const int64_t slot = is_sink ? sink_slots_[n] : slots_[n];
    if (slot < 0 || (!is_sink && (p < starts_[n] || p < first_query - exact_.tail))) return false;
    const int64_t at = is_sink ? p : exact_.sinks + p % (exact_.keys->size(1) - exact_.sinks);
    (is_key ? keys_ : values_).read(slot, at, head, row);
    return true;
  }

 private:
  const PagedExactRows<int64_t>& exact_;
  Indices boundaries_, lengths_, slots_, starts_, sink_slots_;
  Rows keys_, values_, new_keys_, new_values_;
};

// The rotated means of the tiles that the queries see, in the order of their sequences.
class RotatedMeans {
 public:
  explicit RotatedMeans(const AuraPagedAttention<int64_t>& op) : HK_(op.shape.HK), D_(op.shape.D), first_(op.shape.N) {
    const auto& s = op.sequences;
    const Indices table(s.block_table), boundaries(s.cu_seqlens), lengths(s.seq_lens);
    const int64_t tiles_of_block = op.shape.block_size / kTokensOfTile;
    std::vector<std::pair<int64_t, int64_t>> places;  // blocks, and tiles of them
    for (int64_t n = 0; n < op.shape.N; ++n) {
      const int64_t queries = boundaries[n + 1] - boundaries[n], keys = queries == 0 ? 0 : lengths[n];
      const int64_t unseen = s.window > 0 ? std::max<int64_t>(0, keys - queries + 1 - s.window) : 0;
      const int64_t first = unseen / kTokensOfTile;
      first_[n] = static_cast<int64_t>(places.size()) - first;
      for (int64_t i = first; i < ceil_div(keys, kTokensOfTile); ++i) {
        places.emplace_back(table.at(n, i / tiles_of_block), i % tiles_of_block);
      }
    }
    means_.resize(places.size() * HK_ * D_);
    const Rows pages(*op.key.tile_means);
    const Tensor signs = op.key_signs.contiguous();
    at::parallel_for(0, static_cast<int64_t>(places.size()) * HK_, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto& [block, tile] = places[i / HK_];
        pages.read(block, tile, i % HK_, means_.data() + i * D_);
        rotate(means_.data() + i * D_, signs, false, inverse_root(D_));
      }
    });
  }

  const float* of(const paged::Token& token, int64_t head) const {
    const int64_t tile = first_[token.sequence] + token.position / kTokensOfTile;
    return means_.data() + (tile * HK_ + head) * D_;
  }

 private:
  int64_t HK_, D_;
  std::vector<int64_t> first_;  // by sequence, where its tile 0 would be
  std::vector<float> means_;
};

// Reads codes. q and exact rows are rotated like the keys and values, and the result is rotated back from the values'
// space.
class CodedCache {
 public:
  explicit CodedCache(const AuraPagedAttention<int64_t>& op)
      : op_(op),
        D_(op.shape.D),
        key_signs_(op.key_signs.contiguous()),
        value_signs_(op.value_signs.contiguous()),
        q_(op.q.unsqueeze(0), "q"),
        out_(op.out.unsqueeze(0)),
        keys_(op.key.codebook, op.key_code, D_),
        values_(op.value.codebook, op.value_code, D_) {
    if (op.exact.present()) exact_.emplace(op.shape, op.sequences, op.exact);
    if (op.key.tile_means.has_value()) means_.emplace(op);
  }

  void read_query(int64_t token, int64_t head, float* row) const {
    q_.read(0, token, head, row);
    rotate(row, key_signs_, false, inverse_root(D_));
  }
  float read_key(const paged::Token& token, int64_t head, float* row) const {
    if (exact_ && exact_->read(token, head, true, row)) {
      rotate(row, key_signs_, false, inverse_root(D_));
      return 1.0f;
    }
    const float norm = read(op_.key, keys_, token, head, row);
    if (!means_) return norm;
    const float* mean = means_->of(token, head);
    for (int64_t d = 0; d < D_; ++d) row[d] = std::fma(norm, row[d], mean[d]);
    return 1.0f;
  }
  float read_value(const paged::Token& token, int64_t head, float* row) const {
    if (!exact_ || !exact_->read(token, head, false, row)) return read(op_.value, values_, token, head, row);
    rotate(row, value_signs_, false, inverse_root(D_));
    return 1.0f;
  }
  void write_result(int64_t token, int64_t head, float* row) const {
    rotate(row, value_signs_, true, inverse_root(D_));
    out_.write(0, token, head, row);
  }

 private:
  static float read(const CodedTensor& coded, const Codebook& codebook, const paged::Token& token, int64_t head,
                    float* row) {
    codebook.dequantise(words_at(coded.codes, token.block, token.offset, head), row);
    return norm_at(coded.norms, token.block, token.offset, head);
  }

  const AuraPagedAttention<int64_t>& op_;
  int64_t D_;
  Tensor key_signs_, value_signs_;
  Rows q_, out_;
  Codebook keys_, values_;
  optional<ExactTokens> exact_;
  optional<RotatedMeans> means_;
};

void run(const AuraPagedAttention<int64_t>& op) {
  const CodedCache cache(op);
  paged::Attention(op.shape, op.sequences, op.scale, op.sinks, cache).run();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { define<AuraPagedAttention, &run>(m); }

}  // namespace torch_gdn::cpu
