// What the experts' kernels share with their hosts.
#pragma once
#include "core/parameters.h"

// Describes topk_ids [T, k]. The pair of token t and its j-th expert has the number t k + j.
struct PairParameters {
  int64_t token_stride, slot_stride;  // strides of topk_ids, in elements
  int32_t id_bytes;                   // size of an id: 4 or 8
  int32_t tokens, k, experts;
  int32_t count;  // tokens * k
  int32_t tiles;  // most tiles of pairs; the tiles of the shared expert follow
  OpName op;
};

// Strides are in elements. The last strides are 1.
struct MoeGateUpParameters {
  PairParameters pairs;
  int64_t x_stride;
  MatrixParameters experts;                 // w_gate_up [E, 2 I, D]
  MatrixParameters shared_gate, shared_up;  // [IS, D]
  int32_t D, I, IS;                         // IS is 0 without a shared expert
};

struct MoeDownParameters {
  PairParameters pairs;
  MatrixParameters experts;                         // w_down [E, D, I]
  MatrixParameters shared;                          // [D, IS]
  int64_t weight_token_stride, weight_slot_stride;  // strides of topk_weights
  int64_t gate_stride;                              // stride of shared_gate [T, 1]
  int32_t D, I, IS;                                 // IS is 0 without a shared expert
  int32_t weight_type, gate_type;                   // ElementType; if absent, the shared expert's weight is 1
  int32_t has_residual;                             // [T, D]
};

// A simdgroup multiplies this many rows of each of its two matrices. Its registers hold a sum for each row and vector,
// and 16 bytes of codes with their scales for each row. On an H100, 4 rows were slower than 2 in every size.
GDN_CONSTANT int kRowsOfHalf = 2;

GDN_CONSTANT int kFewPairs = 96;  // most pairs of a token and an expert in the kernels for few tokens: 3 per lane

// The number of rows of gate, and of up, that a threadgroup owns. Each threadgroup reads the vectors again. Numbers
// need more rows than codes to keep these reads small. Two small threadgroups wait less than one large one.
template <int Bits>
struct GateUpPlan {
  GDN_CONSTANT int kSimdgroups = Bits == 0 ? 16 : 8;
  GDN_CONSTANT int kRows = kSimdgroups * kRowsOfHalf;
};

GDN_CONSTANT int kDownSimdgroups = 12;
GDN_CONSTANT int kDownLanes = 8;  // lanes that share the columns of a row

// The number of rows of every expert that a threadgroup owns. Each threadgroup reads the vectors again. If weights are
// numbers, the vectors are 1 of 32 bytes read. Codes take more registers per row, so a lane has fewer rows of codes.
template <int Bits>
struct DownPlan {
  GDN_CONSTANT int kRowsOfLane = Bits == 0 ? 8 : 4;
  GDN_CONSTANT int kRows = 32 / kDownLanes * kRowsOfLane;
};

GDN_CONSTANT int kTileColumns = 32;  // rows of each of a threadgroup's two matrices
GDN_CONSTANT int kTileThreads = 128;
GDN_CONSTANT int kTileDepth = 32;  // columns in threadgroup memory at a time

GDN_CONSTANT int kTilePairs = 32;  // per tile, all of one expert

// A tile has sorted pairs first .. first + rows, all of one expert. A surplus tile has 0 rows. Expert E stands for
// skipped pairs.
struct PairTile {
  int32_t expert, first, rows;
};

// Returns the maximum number of tiles for all pairs. The tiles of expert e start at (pairs with a lower expert) /
// kTilePairs + e.
inline constexpr int64_t most_tiles(int64_t pairs, int64_t experts) { return pairs / kTilePairs + experts + 1; }

GDN_CONSTANT int kSumThreads = 256;

GDN_CONSTANT int kLogitsExperts = 4;  // experts per threadgroup
GDN_CONSTANT int kLogitsSimdgroups = 8;
GDN_CONSTANT int kLogitsTokens = 8;  // most tokens per threadgroup; their sums fit in a thread's registers

struct MoeRouterParameters {
  int64_t logits_stride;  // elements between tokens
  int32_t tokens, experts, top_k;
  int32_t groups, open_groups, group_size;
  int32_t bias_type;    // ElementType; absent if there is no bias
  int32_t has_sigmoid;  // if 0, scores are a softmax
  int32_t renormalize;
  float scale;
};
