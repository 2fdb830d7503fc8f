#pragma once
#include "core/matrix_parameters.h"

// Describes topk_ids [T, k]. The pair of token t and its j-th expert has the number t k + j.
struct PairParameters {
  int64_t token_stride, slot_stride;  // strides of topk_ids, in elements
  int32_t id_bytes;                   // size of an id: 4 or 8
  int32_t tokens, k, experts;
  int32_t count;  // tokens * k
  int32_t tiles;  // most tiles of pairs; the tiles of the shared expert follow
  OpName op;
};

// Strides are in elements. The last strides are 1.
struct MoeGateUpParameters {
  PairParameters pairs;
  int64_t x_stride;
  MatrixParameters experts;                 // w_gate_up [E, 2 I, D]
  MatrixParameters shared_gate, shared_up;  // [IS, D]
  int32_t D, I, IS;                         // IS is 0 without a shared expert
};

struct MoeDownParameters {
  PairParameters pairs;
  MatrixParameters experts;                         // w_down [E, D, I]
  MatrixParameters shared;                          // [D, IS]
  int64_t weight_token_stride, weight_slot_stride;  // strides of topk_weights
  int64_t gate_stride;                              // stride of shared_gate [T, 1]
  int32_t D, I, IS;                                 // IS is 0 without a shared expert
  int32_t weight_type, gate_type;                   // ElementType; if absent, the shared expert's weight is 1
  int32_t has_residual;                             // [T, D]
};
