#include "shaders/aura/aura_flash_exact.h"

#include "metal/aura/launches.h"
#include "metal/aura/vectors.h"

namespace torch_gdn {

Launch launch_aura_flash_exact(const AuraAttention<int64_t>& op, const AuraShape<>& shape, int64_t block_size,
                               const Partials& partials) {
  const auto& s = shape;
  const auto& [starts, causal, q_offset, window] = op.visibility;
  const auto& [o, m, l] = partials;
  const Tensor q = unit_last_stride(op.q, "q"), keys = unit_last_stride(*op.exact.keys, "exact_keys");
  const Tensor values = unit_last_stride(*op.exact.values, "exact_values");
  ExactParameters parameters{};
  parameters.q = vector_strides(q);
  parameters.keys = vector_strides(keys);
  parameters.values = vector_strides(values);
  set_query_rows(parameters, s);
  parameters.exact = int32_t(s.E);
  parameters.sinks = int32_t(s.S);
  parameters.coded = int32_t(s.T);
  parameters.block_size = int32_t(block_size);
  parameters.first_block = int32_t(s.NB);
  parameters.blocks = int32_t(s.NB + s.NX);
  parameters.q_offset = int32_t(s.q_offset);
  parameters.causal = causal ? 1 : 0;
  parameters.window = int32_t(window);
  if (starts.has_value()) parameters.start_words = starts->scalar_type() == at::kLong ? 2 : 1;
  parameters.has_vectors = vector_width({keys, values}) == 4 ? 1 : 0;
  parameters.scale = float(scale_or_default(op.scale, s.D));
  const int64_t column_groups = ceil_div(s.D, kExactColumns);
  return {"aura/aura_flash_exact",
          {q.scalar_type(), s.D},
          {q, keys, values, contiguous(starts), o, m, l, parameters},
          {s.NX * column_groups, s.HK * ceil_div(parameters.rows, kExactQueryRows), s.B},
          kAuraThreads};
}

}  // namespace torch_gdn
