#include "shaders/aura/aura_flash_p2.h"

#include "metal/aura/launches.h"
#include "metal/aura/vectors.h"
#include "metal/implement.h"

namespace torch_gdn {

namespace {
// With at least this many blocks, the simdgroups of a threadgroup share its rows.
constexpr int64_t kFewestSharedBlocks = 8;
}  // namespace

Launch launch_aura_flash_p2(const AuraFlashP2<int64_t>& op, const Tensor& o) {
  const auto& s = op.shape;
  const int32_t together = s.NB >= kFewestSharedBlocks ? kAuraThreads / 32 : 1;
  const MergeParameters parameters{vector_parameters(o), int32_t(s.NB + s.NX), int32_t(s.NX),
                                   op.sinks.has_value() ? 1 : 0, together};
  return {"aura/aura_flash_p2",
          {o.scalar_type(), s.D},
          {op.o_partials.contiguous(), op.m_partials.contiguous(), op.l_partials.contiguous(), contiguous(op.sinks),
           op.value_signs.contiguous(), o, parameters},
          {rotation_groups(int64_t(parameters.vectors.count) * together, s.D), 1, 1},
          kAuraThreads};
}

namespace {

void run(const AuraFlashP2<int64_t>& op, const Tensor& o) {
  if (op.shape.NB == 0) {
    o.zero_();
    return;
  }
  launcher().run({launch_aura_flash_p2(op, o)});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<AuraFlashP2, &run>(m); }

}  // namespace torch_gdn
