// y[t] = sum over j of topk_weights[t, j] products[t k + j] in the order of j, then the shared expert's part, then the
// residual.
#pragma once
#include "core/elements.h"
#include "experts/pairs.h"
#include "experts/parameters.h"

METAL_FUNC float shared_weight(device const uchar* shared_gate, constant MoeDownParameters& parameters, int token) {
  if (parameters.gate_type == kAbsent) return 1.0f;
  const float gate = read_float(shared_gate, int64_t(token) * parameters.gate_stride, parameters.gate_type);
  return 1.0f / (1.0f + exp(-gate));
}

// `Products` has at(pair) for one column. The pairs of the shared expert follow those of topk_ids.
template <typename Products>
METAL_FUNC float weighted_sum(
    thread const Products& products,
    device const int* topk_ids,
    device const uchar* topk_weights,
    device const uchar* shared_gate,
    constant MoeDownParameters& parameters,
    int token) {
  constant PairParameters& pairs = parameters.pairs;
  float sum = 0.0f;
  for (int j = 0; j < pairs.k; ++j) {
    if (expert_at(topk_ids, pairs, token, j) == kLeftOut) continue;
    const int64_t at = int64_t(token) * parameters.weight_token_stride + int64_t(j) * parameters.weight_slot_stride;
    sum += read_float(topk_weights, at, parameters.weight_type) * products.at(int64_t(token) * pairs.k + j);
  }
  if (parameters.IS == 0) return sum;
  return sum + shared_weight(shared_gate, parameters, token) * products.at(int64_t(pairs.count) + token);
}

// Adds the residual and rounds. `at` is the position of the element in y and in the residual.
template <typename T>
METAL_FUNC void store_sum(
    device T* y, device const T* residual, constant MoeDownParameters& parameters, int64_t at, float sum) {
  y[at] = T(parameters.has_residual != 0 ? sum + float(residual[at]) : sum);
}
