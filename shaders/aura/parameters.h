// Parameter blocks of the AURA kernels: one text for Metal and for the C++ that fills them in.
#pragma once
#ifdef __METAL__
#include <metal_stdlib>
#else
#include <cstdint>
#endif

// Strides in elements of a [B, H, T, ..] tensor: vectors whose last stride is 1, or one value each.
struct VectorStrides {
  int64_t batch, head, token;
};

// Vectors [B, H, T], one after another: vector i is token i % T of head i / T % H.
struct VectorParameters {
  int64_t count;
  int32_t heads, tokens;
};

struct EncodeParameters {
  VectorParameters vectors;
  VectorStrides x, codes, norms, means;
  int64_t slot_batch, slot_token;  // strides of the slots, in 32-bit words
  int32_t slot_words;              // of a slot: 1 or 2; 0 where token t goes to slot t
  int32_t capacity;                // slots of the cache
  int32_t has_means;
};

struct DecodeParameters {
  VectorParameters vectors;
  VectorStrides codes, norms, means;
  int32_t has_means;
};

struct RotateParameters {
  VectorParameters vectors;
  VectorStrides x;
  float scale;
  int32_t has_sums;
};

// Attention of query rows to the keys of a KV head. Row r of a KV head is query r / ratio of its head r % ratio.
struct FlashParameters {
  VectorStrides q, q_sums, key_codes, key_norms, key_means, value_codes, value_norms, value_means;
  int32_t kv_heads, ratio, queries, keys;  // HK, HQ / HK, L, T
  int32_t block_size, blocks;
  int32_t q_offset, causal, window;  // window 0: none
  int32_t has_key_means, has_value_means;
  int32_t start_words;  // of an element of `starts`: 1 or 2; 0 where there are none
};

struct MergeParameters {
  VectorParameters vectors;  // [B, HQ, L]
  int32_t blocks, has_means, has_sinks;
};
