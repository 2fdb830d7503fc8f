#pragma once
#include "attention/parameters.h"
#include "aura/parameters.h"

struct PagedRotateParameters {
  TokenStrides in, out;
  int64_t boundary;        // stride of cu_seqlens
  int32_t boundary_bytes;  // size of a number: 4 or 8
  int32_t sequences, vectors, tokens, heads;
};
