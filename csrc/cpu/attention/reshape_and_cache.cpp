#include "ops/attention/reshape_and_cache.h"

#include <ATen/Parallel.h>

#include <vector>

#include "cpu/attention/pages.h"
#include "cpu/define.h"

namespace torch_gdn {

namespace {

void run(const ReshapeAndCache<int64_t>& op) {
  const auto& s = op.shape;
  if (op.key_cache.numel() + op.value_cache.numel() == 0) return;
  const Tensor slots = op.slot_mapping.to(at::kLong).contiguous();
  const Tensor key = unit_last_stride(op.key, "key"), value = unit_last_stride(op.value, "value");
  const auto* slot = slots.const_data_ptr<int64_t>();
  const cpu::Pages keys(op.key_cache), values(op.value_cache);
  const cpu::Tokens new_keys(key), new_values(value);
  at::parallel_for(0, op.tokens, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> row(std::max(s.D, op.DV));
    for (int64_t i = begin; i < end; ++i) {
      if (slot[i] < 0) continue;
      for (int64_t head = 0; head < s.HK; ++head) {
        new_keys.read(i, head, s.D, row.data());
        keys.write(slot[i] / s.block_size, slot[i] % s.block_size, head, s.D, row.data());
        new_values.read(i, head, op.DV, row.data());
        values.write(slot[i] / s.block_size, slot[i] % s.block_size, head, op.DV, row.data());
      }
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<ReshapeAndCache, &run>(m); }

}  // namespace torch_gdn
