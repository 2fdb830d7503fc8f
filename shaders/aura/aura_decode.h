#pragma once
#include "aura/parameters.h"

struct DecodeParameters {
  VectorParameters vectors;
  VectorStrides codes, norms, means;
  int32_t has_means;
};
