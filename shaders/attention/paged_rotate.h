#pragma once
#include "attention/parameters.h"
#include "aura/parameters.h"

struct PagedRotateParameters {
  TokenStrides in, out;
  int64_t last_boundary;  // cu_seqlens[last_boundary]: rows of tokens from there on are padding
  int32_t tokens, heads;
};
