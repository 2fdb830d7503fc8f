#include "metal/layers/sum_partials.h"

#include <ATen/ops/empty.h>

#include "metal/parameters.h"
#include "shaders/layers/sum_partials.h"

namespace torch_gdn {

Tensor partial_sums(const Tensor& like, int64_t rows, int64_t columns) {
  return at::empty({rows, columns}, like.options().dtype(at::kFloat));
}

Launch launch_sum_partials(const Tensor& partials, const Tensor& result) {
  const int64_t rows = partials.size(0), elements = result.numel(), columns = partials.size(1) / elements;
  const SumPartialsParameters parameters{int32_t(rows), int32_count(elements, "weight", "elements"), int32_t(columns)};
  return {"layers/sum_partials",
          {result.scalar_type()},
          {partials, result, parameters},
          {ceil_div(elements, 32), 1, 1},
          32 * kSumRows};
}

}  // namespace torch_gdn
