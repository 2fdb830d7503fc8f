// Numbers of a float dtype that is known only when the kernel runs (ElementType).
#pragma once
#include <metal_stdlib>

#include "core/parameters.h"
using namespace metal;

METAL_FUNC float read_float(device const uchar* values, int64_t index, int type) {
  if (type == kFloat32) return ((device const float*)values)[index];
  if (type == kFloat16) return float(((device const half*)values)[index]);
  return float(((device const bfloat*)values)[index]);
}

METAL_FUNC void write_float(device uchar* values, int64_t index, int type, float value) {
  if (type == kFloat32) {
    ((device float*)values)[index] = value;
  } else if (type == kFloat16) {
    ((device half*)values)[index] = half(value);
  } else {
    ((device bfloat*)values)[index] = bfloat(value);
  }
}
