#include "ops/experts/moe_logits.h"

#include <algorithm>
#include <bit>

#include "metal/gates.h"
#include "metal/implement.h"
#include "metal/matrix.h"
#include "shaders/experts/moe_align.h"
#include "shaders/experts/moe_logits.h"
#include "shaders/experts/tile_size.h"
#include "shaders/quantized/parameters.h"

namespace torch_gdn {

namespace {

// More tokens than this are multiplied in tiles, which read the weight once per 32 tokens. A tile has 64 experts, so
// few tokens would give few threadgroups.
constexpr int64_t kFewTokens = 64;

void run(const MoeLogits<int64_t>& op, const Tensor& router_logits) {
  if (op.T == 0) return;
  const Tensor x = unit_last_stride(op.x, "x");
  QuantizedLinearParameters parameters{};
  parameters.weight = matrix_parameters(op.weight, std::nullopt, std::nullopt, {});
  parameters.x_stride = x.stride(0);
  parameters.bias_type = kAbsent;
  parameters.M = int32_count(op.T, "moe_logits: x", "tokens");
  parameters.N = int32_count(op.E, "moe_logits: weight", "experts");
  parameters.K = int32_count(op.D, "moe_logits: x", "columns");
  const int width = vector_width({x, op.weight});
  const auto dtype = x.scalar_type();
  if (op.T <= kFewTokens) {
    const auto most = int64_t(std::bit_ceil(uint64_t(std::min<int64_t>(op.T, kLogitsTokens))));
    launcher().run({{"experts/moe_logits",
                     {dtype, most, width},
                     {x, op.weight, router_logits, parameters},
                     {ceil_div(op.E, kLogitsExperts), ceil_div(op.T, most), 1},
                     kLogitsSimdgroups * 32}});
    return;
  }
  launcher().run({{"quantized/quantized_linear_tiles",
                   {dtype, width, 0, at::kFloat},
                   {x, op.weight, Binding(), Binding(), Binding(), router_logits, parameters},
                   {ceil_div(op.E, 2 * kTileColumns), ceil_div(op.T, kTilePairs), 1},
                   kTileThreads}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<MoeLogits, &run>(m); }

}  // namespace torch_gdn
