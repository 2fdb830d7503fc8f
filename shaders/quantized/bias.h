#pragma once
#include "core/elements.h"
#include "quantized/parameters.h"

METAL_FUNC float bias_at(device const uchar* bias, constant QuantizedLinearParameters& parameters, int row) {
  if (parameters.bias_type == kAbsent) return 0.0f;
  return read_float(bias, row * parameters.bias_stride, parameters.bias_type);
}
