#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kHostCopyThreads = 256;  // per threadgroup

struct CopyFromHostParameters {
  int64_t first;  // first byte of dst to write
  int32_t bytes;
};
