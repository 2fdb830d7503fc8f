// What the AURA kernels share with their hosts.
#pragma once
#include "aura/code_sizes.h"

GDN_CONSTANT int kAuraThreads = 128;  // threads per threadgroup: 4 simdgroups

// Returns how many lanes of a simdgroup share a vector. 80 is 20 * 4, 96 is 12 * 8, and the other sizes are powers of
// two.
inline constexpr int lanes_of(int D) { return D == 80 ? 4 : D == 96 ? 8 : 32; }

// Templates take a code as a number: its bits, plus kTrellis for a trellis code. The window of a trellis code has the
// value's own bits and the bits that follow in the vector's stream, which is a ring.
GDN_CONSTANT int kTrellis = 10 * kWindowBits;
inline constexpr int bits_of(int code) { return code % 10; }
inline constexpr int window_of(int code) { return code > kTrellis ? kWindowBits : code; }
inline constexpr int entries_of(int code) { return 1 << window_of(code); }  // entries of its codebook

// Strides in elements of a tensor [B, H, T, D] whose last stride is 1, or of a tensor [B, H, T].
struct VectorStrides {
  int64_t batch, head, token;
};

// Numbers the vectors of [B, H, T]. Vector i is token i % T of head i / T % H.
struct VectorParameters {
  int32_t count, heads, tokens;
};

// Describes query rows and the keys of their KV head. Row r of a KV head is query r / ratio and head r % ratio of the
// KV head's query heads.
struct FlashParameters {
  VectorStrides q, key_codes, key_norms, value_codes, value_norms;
  int32_t kv_heads, ratio, queries, keys;  // HK, HQ / HK, L, T
  int32_t rows;                            // L * HQ / HK
  int32_t block_size, blocks;              // keys per block, and number of all blocks of a row
  int32_t first_position;                  // position of the first key
  int32_t q_offset, causal, window;        // a window of 0 means no window
  int32_t tiles;                           // number of tiles of keys that have means; 0 without means
  int32_t start_words;                     // words per element of `starts`: 1 or 2; 0 without `starts`
};

struct RotateParameters {
  VectorParameters vectors;
  VectorStrides x;
  float scale;
};

// Returns how many vectors a simdgroup encodes with a trellis code. A lane owns one of the 2^(6 - bits) states of a
// vector.
inline constexpr int trellis_vectors(int bits) { return 32 >> (kWindowBits - bits); }

struct EncodeParameters {
  VectorParameters vectors;
  VectorStrides x, codes, norms, tile_means;
  int64_t slot_batch, slot_token;  // strides of `slots`
  int32_t slot_bytes;              // size of a slot number: 4 or 8; 0 without `slots`, where token t goes to slot t
  int32_t capacity;                // number of slots in the cache
  int32_t has_tile_means;
  OpName op;
};

struct DecodeParameters {
  VectorParameters vectors;
  VectorStrides codes, norms, tile_means;
  int32_t has_tile_means;
};

GDN_CONSTANT int kTileScoreRows = 32;  // most query rows per threadgroup

// Row r of a KV head is query r / ratio and head r % ratio of the KV head's query heads.
struct TileScoreParameters {
  VectorStrides q, means;
  int32_t kv_heads, ratio, queries;  // HK, HQ / HK, L
  int32_t rows;                      // L * HQ / HK
  int32_t tiles;
  float scale;
};

GDN_CONSTANT int kFlashKeys = kAuraThreads;  // the default block size is a multiple of this

// Returns the most query rows per threadgroup. For each row, a lane holds 8 columns of q and of o (16 if D is 512),
// which takes 16 or 32 registers.
inline constexpr int flash_most_rows(int D) { return D <= 256 ? 4 : 2; }

GDN_CONSTANT int kEightRows = 8;       // query rows per threadgroup
GDN_CONSTANT int kEightKeys = 32;      // keys per tile; a simdgroup owns a tile
GDN_CONSTANT int kEightColumns = 256;  // most columns of o per threadgroup

GDN_CONSTANT int kMatrixRows = 32;      // query rows per threadgroup: 8 for each simdgroup
GDN_CONSTANT int kMatrixKeys = 32;      // keys per tile
GDN_CONSTANT int kMatrixColumns = 256;  // most columns of o per threadgroup
GDN_CONSTANT int kMatrixSlice = 128;    // most columns of keys or values that are dequantised at once

GDN_CONSTANT int kExactQueryRows = 8;  // query rows per threadgroup
GDN_CONSTANT int kExactKeys = 128;     // keys per tile: 32 for each simdgroup
GDN_CONSTANT int kExactColumns = 256;  // most columns of o per threadgroup

// Row r of a KV head is query r / ratio and head r % ratio of the KV head's query heads.
struct ExactParameters {
  VectorStrides q, keys, values;
  int32_t kv_heads, ratio, queries;  // HK, HQ / HK, L
  int32_t rows;                      // L * HQ / HK
  int32_t exact, sinks, coded;       // numbers of exact rows, of those before the codes, and of codes
  int32_t block_size;                // exact rows per block, in whole tiles
  int32_t first_block, blocks;       // first block of exact rows, and number of all blocks of a row
  int32_t q_offset, causal, window;  // a window of 0 means no window
  int32_t start_words;               // words per element of `starts`: 1 or 2; 0 without `starts`
  int32_t has_vectors;               // 1 if every exact row starts at a multiple of 4 elements
  float scale;
};

struct MergeParameters {
  VectorParameters vectors;      // [B, HQ, L]
  int32_t blocks, exact_blocks;  // number of all blocks, and of the last ones, which belong to exact rows
  int32_t has_sinks;
  int32_t together;  // number of simdgroups that share their rows: 1 or 4
};
