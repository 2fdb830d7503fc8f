#include "cpu/aura/pass_1.h"

namespace torch_gdn::cpu {

namespace {

// Reads exact rows. Neither they nor q are rotated, so the partial sums of o are not rotated either.
class ExactKeys {
 public:
  ExactKeys(const AuraAttention<int64_t>& op, const AuraShape<>& shape, int64_t block_size)
      : s_(shape),
        block_size_(block_size),
        scale_(static_cast<float>(scale_or_default(op.scale, shape.D))),
        q_tensor_(unit_last_stride(op.q, "q")),
        key_tensor_(unit_last_stride(*op.exact.keys, "exact_keys")),
        value_tensor_(unit_last_stride(*op.exact.values, "exact_values")),
        q_(q_tensor_),
        keys_(key_tensor_),
        values_(value_tensor_) {}

  int64_t blocks() const { return s_.NX; }
  int64_t first_block() const { return s_.NB; }
  int64_t count() const { return s_.E; }
  int64_t block_size() const { return block_size_; }
  int64_t index_of(int64_t position) const { return position <= s_.S ? position : std::max(s_.S, position - s_.T); }

  void read_query(int64_t b, int64_t head, int64_t query, float* row) const {
    q_.read(b, head, query, 0, s_.D, row);
    for (int64_t d = 0; d < s_.D; ++d) row[d] *= scale_;
  }

  float tile_score(int64_t, int64_t, int64_t, int64_t) const { return 0.0f; }

  void read_tile(int64_t b, int64_t hk, int64_t first, int64_t count, WorkItem& item, int64_t width) const {
    for (int64_t i = 0; i < count; ++i) {
      keys_.read(b, hk, first + i, 0, s_.D, item.keys + i * width);
      values_.read(b, hk, first + i, 0, s_.D, item.values + i * width);
    }
    for (float* norms : {item.key_norms, item.value_norms}) std::fill_n(norms, count, 1.0f);
  }

 private:
  const AuraShape<>& s_;
  int64_t block_size_;
  float scale_;
  Tensor q_tensor_, key_tensor_, value_tensor_;
  Rows q_, keys_, values_;
};

}  // namespace

void attend_to_exact_rows(const AuraAttention<int64_t>& op, const AuraShape<>& shape, int64_t block_size,
                          const Partials& partials) {
  if (shape.NX == 0) return;
  const ExactKeys keys(op, shape, block_size);
  Pass1<ExactKeys>(keys, op.visibility, shape, partials).run();
}

}  // namespace torch_gdn::cpu
