#include "ops/aura/aura_decode.h"

#include "metal/aura/vectors.h"
#include "metal/implement.h"
#include "shaders/aura/aura_decode.h"

namespace torch_gdn {

namespace {

void run(const AuraDecode<int64_t>& op, const Tensor& x) {
  const auto codes = as_vectors(op.vectors.codes, "codes"), norms = as_values(op.vectors.norms, "norms");
  auto tile_means = op.vectors.tile_means;
  if (tile_means.has_value()) tile_means = unit_last_stride(*tile_means, "tile_means");
  const DecodeParameters parameters{vector_parameters(codes), vector_strides(codes), vector_strides(norms),
                                    vector_strides(tile_means), tile_means.has_value() ? 1 : 0};
  launcher().run({{"aura/aura_decode",
                   {x.scalar_type(), number_of(op.code), op.D, op.rotated},
                   {codes, norms, op.vectors.codebook.contiguous(), op.signs.contiguous(), tile_means, x, parameters},
                   {rotation_groups(parameters.vectors.count, op.D), 1, 1},
                   kAuraThreads}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<AuraDecode, &run>(m); }

}  // namespace torch_gdn
