#include "ops/attention/qk_norm_rope_and_cache.h"

#include "cpu/attention/pages.h"
#include "cpu/define.h"
#include "cpu/layers/rotated_heads.h"

namespace torch_gdn {

namespace {

void run(const QkNormRopeAndCache<int64_t>& op, const Tensor& q_out) {
  const Indices slots(op.slot_mapping);
  const cpu::Pages keys(op.key_cache);
  cpu::write_heads(op.heads, op.q, op.q_weight, q_out);
  cpu::rotated_heads(op.heads, op.k, op.k_weight, [&](int64_t token, int64_t head, const float* values) {
    if (token < slots.size() && slots[token] >= 0) keys.write_slot(slots[token], head, op.heads.D, values);
  });
  cpu::store(op.v, op.value_cache, slots);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<QkNormRopeAndCache, &run>(m); }

}  // namespace torch_gdn
