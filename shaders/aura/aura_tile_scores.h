// Geometry and parameters of the products of queries with the means of tiles.
#pragma once
#include "aura/parameters.h"

GDN_CONSTANT int kTileScoreRows = 32;  // query rows of a threadgroup

// Row r of a KV head is query r / ratio of its head r % ratio.
struct TileScoreParameters {
  VectorStrides q, means;
  int32_t kv_heads, ratio, queries;  // HK, HQ / HK, L
  int32_t rows;                      // L * HQ / HK
  int32_t tiles;
  float scale;
};
