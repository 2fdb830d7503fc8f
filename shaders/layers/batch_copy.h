#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kCopyThreads = 256;  // per threadgroup
GDN_CONSTANT int kCopyUnits = 4;      // per thread, which loads all of them before it stores one

struct BatchCopyParameters {
  int64_t pool_bytes;
  int64_t source_stride, destination_stride, size_stride;  // strides of the three vectors, in their elements
  int32_t source_bytes, destination_bytes, size_bytes;     // size of a number: 4 or 8
  int32_t misalignment;                                    // the pool's address modulo 16
  OpName op;
};
