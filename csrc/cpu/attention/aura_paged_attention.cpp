#include "ops/attention/aura_paged_attention.h"

#include <cmath>

#include "cpu/attention/attention.h"
#include "cpu/attention/pages.h"
#include "cpu/aura/codes.h"
#include "cpu/aura/rotation.h"
#include "cpu/define.h"

namespace torch_gdn::cpu {

namespace {

// Reads codes. q is rotated like the keys, and the result is rotated back from the values' space.
class CodedCache {
 public:
  explicit CodedCache(const AuraPagedAttention<int64_t>& op)
      : op_(op),
        D_(op.shape.D),
        factor_(1.0f / std::sqrt(static_cast<float>(D_))),
        q_tensor_(unit_last_stride(op.q, "q")),
        key_signs_(op.key_signs.contiguous()),
        value_signs_(op.value_signs.contiguous()),
        q_(q_tensor_),
        out_(op.out),
        keys_(op.key.codebook, op.key_bits, D_),
        values_(op.value.codebook, op.value_bits, D_) {}

  void read_query(int64_t token, int64_t head, float* row) const {
    q_.read(token, head, D_, row);
    rotate_row(row, key_signs_, false);
  }
  float read_key(int64_t block, int64_t offset, int64_t head, float* row) const {
    return read(op_.key, keys_, block, offset, head, row);
  }
  float read_value(int64_t block, int64_t offset, int64_t head, float* row) const {
    return read(op_.value, values_, block, offset, head, row);
  }
  void write_result(int64_t token, int64_t head, float* row) const {
    rotate_row(row, value_signs_, true);
    out_.write(token, head, D_, row);
  }

 private:
  static int64_t place(const Tensor& x, int64_t block, int64_t offset, int64_t head) {
    return block * x.stride(0) + offset * x.stride(1) + head * x.stride(2);
  }
  static float read(const CodedTensor& coded, const Codebook& codebook, int64_t block, int64_t offset, int64_t head,
                    float* row) {
    codebook.dequantise(coded.codes.const_data_ptr<int32_t>() + place(coded.codes, block, offset, head), row);
    return coded.norms.const_data_ptr<c10::Half>()[place(coded.norms, block, offset, head)];
  }
  void rotate_row(float* row, const Tensor& signs, bool inverse) const {
    rotate(row, signs.const_data_ptr<float>(), D_, inverse);
    for (int64_t d = 0; d < D_; ++d) row[d] *= factor_;
  }

  const AuraPagedAttention<int64_t>& op_;
  int64_t D_;
  float factor_;
  Tensor q_tensor_, key_signs_, value_signs_;
  Tokens q_, out_;
  Codebook keys_, values_;
};

void run(const AuraPagedAttention<int64_t>& op) {
  const CodedCache cache(op);
  paged::Attention(op.shape, op.sequences, op.scale, op.sinks, cache).run();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { define<AuraPagedAttention, &run>(m); }

}  // namespace torch_gdn::cpu
