// Strides, geometry and parameters of attention, which several AURA kernels share with the host.
#pragma once
#include "aura/window.h"
#include "core/parameters.h"

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
