#pragma once
#include "experts/parameters.h"

GDN_CONSTANT int kGateUpSimdgroups = 8;
GDN_CONSTANT int kGateUpRows = kGateUpSimdgroups * kRowsOfHalf;  // of gate, and as many of up, in a threadgroup

// Strides are in elements. The last ones are 1.
struct MoeGateUpParameters {
  PairParameters pairs;
  int64_t x_stride;
  int64_t expert_stride, row_stride;             // of w_gate_up [E, 2 I, D]
  int64_t shared_gate_stride, shared_up_stride;  // of the rows [IS, D]
  int32_t D, I, IS;                              // IS of 0: there is no shared expert
};
