// Geometry and parameters of aura_tile_scores, which multiplies queries with the means of tiles.
#pragma once
#include "aura/parameters.h"

GDN_CONSTANT int kTileScoreRows = 32;  // most query rows per threadgroup

// Row r of a KV head is query r / ratio and head r % ratio of the KV head's query heads.
struct TileScoreParameters {
  VectorStrides q, means;
  int32_t kv_heads, ratio, queries;  // HK, HQ / HK, L
  int32_t rows;                      // L * HQ / HK
  int32_t tiles;
  float scale;
};
