// What several AURA kernels share with the host: strides, geometry, attention's parameters.
#pragma once
#include "aura/window.h"
#include "core/parameters.h"

GDN_CONSTANT int kAuraThreads = 128;  // of a threadgroup: 4 simdgroups

// Returns how many lanes of a simdgroup share a vector. 80 is 20 * 4, 96 is 12 * 8, and the other sizes are powers of
// two.
inline constexpr int lanes_of(int D) { return D == 80 ? 4 : D == 96 ? 8 : 32; }

// In templates a code is a number: its bits, or kTrellis more if it is a trellis code. A value's window is its own bits
// and the next ones of the vector's stream, which closes into a ring.
GDN_CONSTANT int kTrellis = 10 * kWindowBits;
inline constexpr int bits_of(int code) { return code % 10; }
inline constexpr int window_of(int code) { return code > kTrellis ? kWindowBits : code; }
inline constexpr int entries_of(int code) { return 1 << window_of(code); }  // of its codebook

// Strides in elements of a [B, H, T, ..] tensor of vectors, whose last stride is 1, or of one value each.
struct VectorStrides {
  int64_t batch, head, token;
};

// The vectors [B, H, T] have one number: vector i is token i % T of head i / T % H.
struct VectorParameters {
  int32_t count, heads, tokens;
};

// Query rows against the keys of a KV head. Row r of a KV head is query r / ratio of its head r % ratio.
struct FlashParameters {
  VectorStrides q, key_codes, key_norms, value_codes, value_norms;
  int32_t kv_heads, ratio, queries, keys;  // HK, HQ / HK, L, T
  int32_t rows;                            // L * HQ / HK
  int32_t block_size, blocks;              // keys of a block; all blocks of a row's partials
  int32_t first_position;                  // position of the first key
  int32_t q_offset, causal, window;        // a window of 0 means none
  int32_t tiles;                           // of keys from which means were subtracted; 0 if none were
  int32_t start_words;                     // of an element of `starts`: 1 or 2; 0 without `starts`
};
