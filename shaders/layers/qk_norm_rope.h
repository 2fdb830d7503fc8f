#pragma once
#include "layers/rotation.h"

struct QkNormRopeParameters {
  int32_t rows, tokens, heads;  // [B, T, HQ + HK]
  int32_t q_heads;              // HQ
  RowStrides q, k;
  RowStrides q_out, k_out;
  Rotation rotation;
};
