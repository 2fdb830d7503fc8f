#pragma once
#include "aura/parameters.h"

struct DecodeParameters {
  VectorParameters vectors;
  VectorStrides codes, norms, means, tile_means;
  int32_t has_means, has_tile_means;
};
