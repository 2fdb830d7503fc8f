#pragma once
#include "aura/parameters.h"

struct RotateParameters {
  VectorParameters vectors;
  VectorStrides x;
  float scale;
  int32_t has_sums;
};
