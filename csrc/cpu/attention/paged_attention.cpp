#include "ops/attention/paged_attention.h"

#include "cpu/attention/attention.h"
#include "cpu/attention/pages.h"
#include "cpu/define.h"

namespace torch_gdn::cpu {

namespace {

// Reads keys and values that are not coded.
class PlainCache {
 public:
  explicit PlainCache(const PagedAttention<int64_t>& op)
      : D_(op.shape.D),
        q_tensor_(unit_last_stride(op.q, "q")),
        q_(q_tensor_),
        out_(op.out),
        keys_(op.key_cache),
        values_(op.value_cache) {}

  void read_query(int64_t token, int64_t head, float* row) const { q_.read(token, head, D_, row); }
  float read_key(const paged::Token& token, int64_t head, float* row) const {
    keys_.read(token.block, token.offset, head, D_, row);
    return 1.0f;
  }
  float read_value(const paged::Token& token, int64_t head, float* row) const {
    values_.read(token.block, token.offset, head, D_, row);
    return 1.0f;
  }
  void write_result(int64_t token, int64_t head, float* row) const { out_.write(token, head, D_, row); }

 private:
  int64_t D_;
  Tensor q_tensor_;
  Tokens q_, out_;
  Pages keys_, values_;
};

void run(const PagedAttention<int64_t>& op) {
  const PlainCache cache(op);
  paged::Attention(op.shape, op.sequences, op.scale, op.sinks, cache).run();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { define<PagedAttention, &run>(m); }

}  // namespace torch_gdn::cpu
