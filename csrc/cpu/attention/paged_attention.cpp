#include "ops/attention/paged_attention.h"

#include "cpu/attention/attention.h"
#include "cpu/define.h"

namespace torch_gdn::cpu {

namespace {

// Reads keys and values that are not coded.
class PlainCache {
 public:
  explicit PlainCache(const PagedAttention<int64_t>& op)
      : q_(op.q.unsqueeze(0), "q"), out_(op.out.unsqueeze(0)), keys_(op.key_cache), values_(op.value_cache) {}

  void read_query(int64_t token, int64_t head, float* row) const { q_.read(0, token, head, row); }
  float read_key(const paged::Token& token, int64_t head, float* row) const {
    keys_.read(token.block, token.offset, head, row);
    return 1.0f;
  }
  float read_value(const paged::Token& token, int64_t head, float* row) const {
    values_.read(token.block, token.offset, head, row);
    return 1.0f;
  }
  void write_result(int64_t token, int64_t head, float* row) const { out_.write(0, token, head, row); }

 private:
  Rows q_, out_, keys_, values_;
};

void run(const PagedAttention<int64_t>& op) {
  const PlainCache cache(op);
  paged::Attention(op.shape, op.sequences, op.scale, op.sinks, cache).run();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { define<PagedAttention, &run>(m); }

}  // namespace torch_gdn::cpu
