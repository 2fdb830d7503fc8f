#pragma once
#include "experts/parameters.h"

struct QuantizedLinearParameters {
  MatrixParameters weight;  // [N, K]
  int64_t x_stride;         // elements between rows of x [M, K]
  int64_t bias_stride;
  int32_t M, N, K;
  int32_t bias_type;  // ElementType
};

struct DequantizeParameters {
  MatrixParameters weight;  // [N, K]
  int32_t N, K;
  int32_t index_bytes;  // size of an index: 4 or 8; 0 for all rows
  OpName op;
};

GDN_CONSTANT int kLinearSimdgroups = 8;
GDN_CONSTANT int kLinearRows = kLinearSimdgroups * kRowsOfHalf * 2;  // rows of W per threadgroup

GDN_CONSTANT int kDequantizeThreads = 128;
GDN_CONSTANT int kDequantizeColumns = 8;  // per thread
