#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kHostCopyThreads = 256;  // per threadgroup

struct CopyFromHostParameters {
  int64_t first;  // byte of dst
  int32_t bytes;
};
