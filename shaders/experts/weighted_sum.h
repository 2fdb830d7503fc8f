// The parts of the weighted sum of a token's products:
//     y[t] = sum over j of topk_weights[t, j] products[t k + j]
// The sum is in the order of j. The shared expert's part follows, then the residual.
#pragma once
#include "core/elements.h"
#include "experts/pairs.h"
#include "experts/parameters.h"

METAL_FUNC float weight_at(
    device const uchar* topk_weights, constant MoeDownParameters& parameters, int token, int slot) {
  const int64_t at = token * parameters.weight_token_stride + slot * parameters.weight_slot_stride;
  return read_float(topk_weights, at, parameters.weight_type);
}

METAL_FUNC float shared_weight(device const uchar* shared_gate, constant MoeDownParameters& parameters, int token) {
  if (parameters.gate_type == kAbsent) return 1.0f;
  const float gate = read_float(shared_gate, int64_t(token) * parameters.gate_stride, parameters.gate_type);
  return 1.0f / (1.0f + exp(-gate));
}

// Adds the residual and rounds. `at` is the position of the element in y and in the residual.
template <typename T>
METAL_FUNC void store_sum(
    device T* y, device const T* residual, constant MoeDownParameters& parameters, int64_t at, float sum) {
  y[at] = T(parameters.has_residual != 0 ? sum + float(residual[at]) : sum);
}
