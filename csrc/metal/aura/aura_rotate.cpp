#include "shaders/aura/aura_rotate.h"

#include "metal/aura/launches.h"
#include "metal/aura/vectors.h"
#include "metal/implement.h"

namespace torch_gdn {

Launch launch_aura_rotate(const AuraRotate<int64_t>& op, const Tensor& y) {
  const Tensor x = as_vectors(op.x, "x");
  const RotateParameters parameters{vector_parameters(x), vector_strides(x), float(op.scale)};
  return {"aura/aura_rotate",
          {x.scalar_type(), x.size(3), op.inverse},
          {x, op.signs.contiguous(), y, parameters},
          {rotation_groups(parameters.vectors.count, x.size(3)), 1, 1},
          kAuraThreads};
}

namespace {

void run(const AuraRotate<int64_t>& op, const Tensor& y) { launcher().run({launch_aura_rotate(op, y)}); }

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<AuraRotate, &run>(m); }

}  // namespace torch_gdn
