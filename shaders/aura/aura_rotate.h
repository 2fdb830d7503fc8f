#pragma once
#include "aura/parameters.h"

struct RotateParameters {
  VectorParameters vectors;
  VectorStrides x;
  float scale;
};
