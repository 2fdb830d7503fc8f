#pragma once
#include "aura/parameters.h"

struct DecodeParameters {
  VectorParameters vectors;
  VectorStrides codes, norms, tile_means;
  int32_t has_tile_means;
};
