#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kFewTokens = 8;     // whose experts' weights are read once, by the kernels for few tokens
GDN_CONSTANT int kFewPairs = 96;     // of a token and an expert, which these kernels take: 3 a lane
GDN_CONSTANT int kRowsOfHalf = 4;    // rows of each of the two matrices that a simdgroup multiplies
GDN_CONSTANT int kTilePairs = 32;    // of one expert, in a tile of the kernels for many tokens
GDN_CONSTANT int kTileColumns = 32;  // of each of the two matrices
GDN_CONSTANT int kTileThreads = 128;
GDN_CONSTANT int kSumThreads = 256;

// topk_ids [T, k]; a pair of a token and an expert has the number t k + j.
struct PairParameters {
  int64_t token_stride, slot_stride;  // in elements of topk_ids
  int32_t id_bytes;                   // 4 or 8
  int32_t tokens, k, experts;
  int32_t count;  // tokens * k
  int32_t tiles;  // of pairs, at most; those of the shared expert follow
  OpName op;
};

// Pairs first .. first + rows of the sorted ones, which have one expert; 0 rows: a surplus tile. Expert E: left out.
struct PairTile {
  int32_t expert, first, rows;
};
