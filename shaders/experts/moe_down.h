#pragma once
#include "experts/parameters.h"

GDN_CONSTANT int kDownSimdgroups = 4;
GDN_CONSTANT int kDownRows = kDownSimdgroups * kRowsOfHalf * 2;  // of a threadgroup

// Strides are in elements. The last ones are 1.
struct MoeDownParameters {
  PairParameters pairs;
  int64_t expert_stride, row_stride;                // of w_down [E, D, I]
  int64_t shared_stride;                            // of the rows [D, IS]
  int64_t weight_token_stride, weight_slot_stride;  // of topk_weights
  int64_t gate_stride;                              // of shared_gate [T, 1]
  int32_t D, I, IS;                                 // IS of 0: there is no shared expert
  int32_t weight_type, gate_type;                   // ElementType; absent: the shared expert's weight is 1
};
