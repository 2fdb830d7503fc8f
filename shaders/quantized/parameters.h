#pragma once
#include "core/matrix_parameters.h"

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
