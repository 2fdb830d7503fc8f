#include "cpu/aura/codes.h"
#include "cpu/aura/pass_1.h"
#include "cpu/define.h"

namespace torch_gdn::cpu {

namespace {

class CodedKeys {
 public:
  explicit CodedKeys(const AuraFlashP1<int64_t>& op)
      : op_(op),
        D_(op.shape.D),
        q_rot_(unit_last_stride(op.q_rot, "q_rot")),
        key_codes_(unit_last_stride(op.key.codes, "key_codes")),
        value_codes_(unit_last_stride(op.value.codes, "value_codes")),
        tile_score_tensor_(op.tile_scores.has_value() ? op.tile_scores->contiguous() : Tensor()),
        tile_scores_(op.tile_scores.has_value() ? tile_score_tensor_.const_data_ptr<float>() : nullptr),
        q_(q_rot_),
        keys_(op.key.codebook, op.shape.key_code, D_),
        values_(op.value.codebook, op.shape.value_code, D_) {}

  int64_t blocks() const { return op_.shape.NB; }
  int64_t first_block() const { return 0; }
  int64_t count() const { return op_.shape.T; }
  int64_t block_size() const { return op_.block_size; }
  int64_t index_of(int64_t position) const { return position - op_.shape.S; }

  void read_query(int64_t b, int64_t head, int64_t query, float* row) const { q_.read(b, head, query, 0, D_, row); }

  float tile_score(int64_t b, int64_t head, int64_t query, int64_t key) const {
    static_assert(kTokensOfTile % kTileKeys == 0, "the keys that are read together are in one tile");
    const auto& s = op_.shape;
    if (tile_scores_ == nullptr) return 0.0f;
    return tile_scores_[((b * s.HQ + head) * s.L + query) * tiles_of(s.T) + key / kTokensOfTile];
  }

  void read_tile(int64_t b, int64_t hk, int64_t first, int64_t count, WorkItem& item, int64_t width) const {
    keys_.dequantise(words_at(key_codes_, b, hk, first), key_codes_.stride(2), count, item.keys, width);
    values_.dequantise(words_at(value_codes_, b, hk, first), value_codes_.stride(2), count, item.values, width);
    for (int64_t i = 0; i < count; ++i) {
      item.key_norms[i] = norm_at(op_.key.norms, b, hk, first + i);
      item.value_norms[i] = norm_at(op_.value.norms, b, hk, first + i);
    }
  }

 private:
  const AuraFlashP1<int64_t>& op_;
  int64_t D_;
  Tensor q_rot_, key_codes_, value_codes_, tile_score_tensor_;
  const float* tile_scores_;  // nullptr if keys have no means of tiles
  Rows q_;
  Codebook keys_, values_;
};

}  // namespace

void flash_p1(const AuraFlashP1<int64_t>& op, const Partials& partials) {
  if (std::get<1>(partials).numel() == 0 || op.shape.NB == 0) return;
  const CodedKeys keys(op);
  Pass1<CodedKeys>(keys, op.visibility, op.shape, partials).run();
}

TORCH_LIBRARY_FRAGMENT(gdn, m) { define<AuraFlashP1, &flash_p1>(m); }

}  // namespace torch_gdn::cpu
