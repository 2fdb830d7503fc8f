// Reads numbers of a float dtype that is known only when the kernel runs (ElementType).
#pragma once
#include <metal_stdlib>

#include "core/parameters.h"
using namespace metal;

// Loads only the bits, so that the load does not wait for the conversion to a number.
METAL_FUNC uint read_bits(device const uchar* values, int64_t index, int type) {
  if (type == kFloat32) return ((device const uint*)values)[index];
  return ((device const ushort*)values)[index];
}

METAL_FUNC float float_of_16_bits(ushort bits, int type) {
  return type == kFloat16 ? float(as_type<half>(bits)) : as_type<float>(uint(bits) << 16);
}

METAL_FUNC float float_of_bits(uint bits, int type) {
  return type == kFloat32 ? as_type<float>(bits) : float_of_16_bits(ushort(bits), type);
}

METAL_FUNC float read_float(device const uchar* values, int64_t index, int type) {
  return float_of_bits(read_bits(values, index, type), type);
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
