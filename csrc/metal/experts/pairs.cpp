#include "metal/experts/pairs.h"

namespace torch_gdn {

PairParameters pair_parameters(const ExpertShape<>& shape, const Tensor& topk_ids) {
  PairParameters parameters{};
  parameters.token_stride = topk_ids.stride(0);
  parameters.slot_stride = topk_ids.stride(1);
  parameters.id_bytes = int32_t(topk_ids.element_size());
  parameters.tokens = int32_count(shape.T, "experts", "tokens");
  parameters.k = int32_t(shape.k);
  parameters.experts = int32_count(shape.E, "experts", "experts");
  parameters.count =
      int32_count(shape.T * (shape.k + 1), "experts", "pairs of a token and an expert") - int32_t(shape.T);
  parameters.op = op_name();
  return parameters;
}

Alignment new_alignment(const ExpertShape<>& shape, const Tensor& topk_ids) {
  const auto options = topk_ids.options().dtype(at::kInt);
  const int64_t pairs = shape.T * shape.k, tiles = most_tiles(pairs, shape.E);
  return {at::empty({pairs}, options), at::empty({tiles, 3}, options), tiles,
          shape.IS > 0 ? ceil_div(shape.T, kTilePairs) : 0};
}

static constexpr int64_t kThreads = 32;

Launch launch_align(const Alignment& alignment, const Tensor& topk_ids, const PairParameters& parameters) {
  return {"experts/moe_align",
          {kThreads},
          {topk_ids, alignment.sorted_pairs, alignment.tiles, Binding::error_log(), parameters},
          {parameters.experts + 1, 1, 1},
          kThreads};
}

}  // namespace torch_gdn
