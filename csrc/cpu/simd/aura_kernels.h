// The inner loops of AURA's ops. They work on raw memory, in the best ISA variant for this machine.
#pragma once
#include <cstdint>

#include "shaders/aura/code_sizes.h"

namespace torch_gdn::cpu {

constexpr int64_t kTileKeys = 64;  // keys that are dequantised at once: 32 KB with D = 128

// Centroids in the form that registers hold: up to 64 (repeated if there are fewer than 16), or the 16-bit halves of
// 256.
struct CodeTable {
  alignas(64) float centroids[64];
  alignas(64) uint16_t low[256], high[256];
};

// Packed rows of D codes, `stride` words apart, and rows of floats, `width` floats apart. A code has `bits` bits. The
// `window` bits from its first bit on, in a ring, choose its centroid.
struct Dequantise {
  const int32_t* words;
  int64_t stride, rows, bits, window, D;
  const CodeTable* table;
  float* out;
  int64_t width;
};

// The state of a row of q between tiles: the largest score, and the sum of exp(score - m). `tile_score` is added to the
// scores of the current tile.
struct AuraRow {
  float m, l, tile_score = 0;
};

// Some rows of q, and `count` keys and values, all as rows of `width` floats. There are kTileKeys norms.
struct AuraTile {
  const float *q, *keys, *values;
  int64_t rows, count, width;
  const float *key_norms, *value_norms;
  float *scores, *o;  // [rows, kTileKeys], [rows, width]
  AuraRow* states;
};

constexpr int64_t kMostRows = 16;  // most rows that Viterbi's algorithm encodes together
constexpr int64_t kMostStates = 16;

// Rows for a trellis code. Value d of row r is x[d * rows + r]. `choices` has kMostStates words for each row and
// kHeldChoices values.
struct TrellisRows {
  const float *x, *labels;
  int64_t D, bits;
  uint32_t* choices;
  uint8_t* windows;  // the result, with the layout of x
};

struct AuraKernels {
  void (*dequantise)(const Dequantise& codes);  // nullptr if the ISA is no faster than decoding byte by byte
  void (*dot_products)(const AuraTile& tile);
  void (*online_softmax)(const AuraTile& tile, int64_t row, int64_t from, int64_t to);
  void (*add_weighted)(const AuraTile& tile);
  // A coordinate's code is the number of boundaries below it. The code of NaN is 0.
  void (*quantise)(const float* y, const float* boundaries, int64_t D, int64_t bits, int32_t* codes);
  // Multiplies groups of `width` coordinates by Sylvester's Hadamard matrix.
  void (*multiply_by_sylvester)(float* x, int64_t D, int64_t width);
  int64_t trellis_rows;  // at most kMostRows
  // Finds the windows of the ring whose labels are nearest to the values of each row.
  void (*nearest_windows)(const TrellisRows& rows);
};
const AuraKernels& aura_kernels();

}  // namespace torch_gdn::cpu
