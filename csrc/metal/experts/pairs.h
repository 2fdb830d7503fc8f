// Lists the pairs of a token and an expert, for both the kernels for few tokens and those for many.
#pragma once
#include <ATen/ops/empty.h>

#include "metal/implement.h"
#include "ops/experts/experts.h"
#include "shaders/experts/few_pairs.h"
#include "shaders/experts/moe_align.h"
#include "shaders/experts/tile_size.h"

namespace torch_gdn {

constexpr int64_t kFewTokens = 8;  // the most tokens whose sums fit in a kernel's registers

PairParameters pair_parameters(const ExpertShape<>& shape, const Tensor& topk_ids);

// Returns whether a step has so few tokens that it uses the kernels that read each active expert's weights once.
inline bool is_few(const ExpertShape<>& shape) {
  return shape.T <= kFewTokens && shape.T * shape.k <= kFewPairs && (shape.T > 1 || shape.k <= 32);
}
// Returns the number of tokens whose sums the kernel's registers hold.
inline int64_t most_tokens(const ExpertShape<>& shape) { return shape.T == 1 ? 1 : kFewTokens; }

// The output of moe_align for topk_ids.
struct Alignment {
  Tensor sorted_pairs, tiles;
  int64_t tiles_of_pairs, tiles_of_tokens;  // tiles_of_tokens belong to the shared expert
};
Alignment new_alignment(const ExpertShape<>& shape, const Tensor& topk_ids);
Launch launch_align(const Alignment& alignment, const Tensor& topk_ids, const PairParameters& parameters);

}  // namespace torch_gdn
