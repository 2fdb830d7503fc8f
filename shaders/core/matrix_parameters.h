#pragma once
#include "core/parameters.h"

// The template argument Bits of a matrix of e4m3 numbers, or of e2m1 numbers with e8m0 scales, in the place of a number
// of bits.
enum { kE4M3 = 43, kE2M1 = 21 };

// Describes one matrix of weights, or one per expert. Strides are in elements. The last strides are 1.
struct MatrixParameters {
  int64_t expert_stride, row_stride;
  // The strides of the scales and biases of packed weights.
  int64_t scales_expert_stride, scales_row_stride, biases_expert_stride, biases_row_stride;
  int16_t scale_type;       // ElementType
  int16_t has_zero_points;  // 1 if biases are zero points in bytes
  int32_t group_shift;      // a group has 1 << group_shift columns
  int32_t row_shift;        // of e4m3 numbers, 1 << row_shift rows share a scale
  int32_t columns;          // of e4m3 numbers
};
