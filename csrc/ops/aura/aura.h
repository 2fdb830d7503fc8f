// What the AURA ops share: attention to a KV cache of codes.
#pragma once
#include <c10/util/SmallVector.h>

#include <algorithm>

#include "ops/chunk_shape.h"
#include "ops/op.h"
#include "shaders/aura/code_sizes.h"

namespace torch_gdn {

// A value has `bits` bits of its own. The `window` bits that choose its entry of a codebook are these, or, in a trellis
// code, these and the next ones of the vector's stream, which closes into a ring.
struct Code {
  int64_t bits = 0, window = 0;
  bool is_trellis() const { return window > bits; }
};

template <typename Int = int64_t>
struct AuraShape {
  Int B = 0, HQ = 0, HK = 0, L = 0, T = 0, D = 0;  // 0 if the op does not have the dimension
  Int E = 0, S = 0;                                // rows kept exact, and how many of them precede the codes
  Int NB = 0, NX = 0;                              // blocks of codes, and of exact rows
  Int q_offset = 0;                                // position of the first query
  Code key_code, value_code;
};

// Keys or values of a cache: codes [B, HK, T, words] int32, codebook [2^bits] or [2^bits, 2^(6 - bits)] float32, norms
// [B, HK, T] float16, and means of tiles [B, HK, tiles, D] float16.
struct CodedTensor {
  Tensor codes, norms, codebook;
  optional<Tensor> tile_means = std::nullopt;
};

template <typename Int>
Int tiles_of(const Int& tokens) {
  return ceil_div(tokens, Int(kTokensOfTile));
}

// Keys and values that stay in q's dtype, [B, HK, rows, D] each. Either both tensors are given or none. The first
// `sinks` rows have positions 0, 1, .., the T codes have the positions after them, and the other rows up to `length`
// follow.
template <typename Int>
struct ExactRows {
  optional<Tensor> keys, values;
  Int sinks = 0;
  optional<Int> length;  // the number of all rows
};

// A query at position p sees keys from starts[b] on, up to p if causal, and only the last `window` of these.
template <typename Int>
struct Visibility {
  optional<Tensor> starts;  // [B]
  bool causal;
  optional<Int> q_offset;  // T + E - L by default
  int64_t window;          // 0 means no window
};

constexpr int64_t kLargestPosition = INT32_MAX / 2;

template <typename Int>
Int code_words(const Int& D, int64_t bits) {
  return ceil_div(D * bits, Int(32));
}

template <typename Int>
Int check_head_size(const Check<Int>& check, const char* argument, const Int& D) {
  const bool is_supported = D == 64 || D == 80 || D == 96 || D == 128 || D == 256 || D == 512;
  check.value(is_supported, argument, "a head size of 64, 80, 96, 128, 256 or 512", D);
  return D;
}

template <typename Int>
void check_table(const Check<Int>& check, const char* argument, const Tensor& x, const char* pattern, const Int& size) {
  check.is_float32(argument, x).shape(pattern, {size});
}

// A codebook of two dimensions is that of a trellis code.
template <typename Int>
Code check_codebook(const Check<Int>& check, const char* argument, const Tensor& codebook) {
  check.is_float32(argument, codebook);
  const bool is_trellis = codebook.dim() == 2;
  if (!is_trellis) check.dimensions(argument, codebook, 1, "[2^bits] or [2^bits, 2^(6 - bits)]");
  const Int size = size_of<Int>(codebook, 0);
  for (const int64_t bits : {2, 3, 4, 5, 8}) {
    const int64_t states = int64_t(1) << std::max<int64_t>(kWindowBits - bits, 0);
    const bool fits = !is_trellis || (bits <= 4 && size_of<Int>(codebook, 1) == states);
    if (fits && size == (int64_t(1) << bits)) return {bits, is_trellis ? kWindowBits : bits};
  }
  if (is_trellis) {
    check.value(false, argument, "[4, 16], [8, 8] or [16, 4] labels (2, 3 or 4 bits)", size, " and ",
                size_of<Int>(codebook, 1));
  }
  check.value(false, argument, "4, 8, 16, 32 or 256 centroids (2, 3, 4, 5 or 8 bits)", size);
  return {};
}

template <typename Int>
void check_codes(const Check<Int>& check, const char* argument, const Tensor& codes, const Sizes<Int>& rows,
                 const Int& D, const Code& code) {
  check.is_int32(argument, codes).shape("[.., ceil(D * bits / 32)]", with_last(rows, code_words(D, code.bits)));
}

// The tensor has one value for each row of codes.
template <typename Int>
void check_norms(const Check<Int>& check, const char* argument, const Tensor& norms, const Sizes<Int>& rows) {
  check.is_of_dtype(argument, norms, at::kHalf).shape("that of the codes without their words", rows);
}

// The mean of channel d of tile i was subtracted from tokens 128 i to 128 i + 127 before they were encoded.
template <typename Int>
void check_tile_means(const Check<Int>& check, const char* argument, const Tensor& x, const Int& B, const Int& HK,
                      const Int& tokens, const Int& D) {
  check.is_of_dtype(argument, x, at::kHalf).dimensions(4, "[B, HK, tiles, D]");
  const Int tiles = size_of<Int>(x, 2);
  check.shape(argument, x, "[B, HK, tiles, D]", {B, HK, tiles, D});
  check.value(sym_ge(tiles, tiles_of(tokens)), argument, "a tile for each 128 tokens", tiles, " for ", tokens,
              " tokens");
}

// Checks `starts` or `slots`.
template <typename Int>
void check_index(const Check<Int>& check, const char* argument, const Tensor& x) {
  check.is_index(argument, x);
  check.on_device(argument, x);
}

template <typename Int>
void check_block_size(const Check<Int>& check, const Int& size) {
  check.value(sym_ge(size, Int(16)), "block_size", "a multiple of 16", size);
  check.value(sym_eq(size % 16, Int(0)), "block_size", "a multiple of 16", size);
}

// Pass 1 and the end-to-end op use this.
template <typename Int>
struct CachedAttention {
  CodedTensor key, value;
  Visibility<Int> visibility;

  AuraShape<Int> shape;

  // `length` is the number of tokens in the cache. By default it is the size of the cache.
  void check_cache(const Check<Int>& check, const char* q_name, const Tensor& q,
                   const optional<Int>& length = std::nullopt, const ExactRows<Int>& exact = {}) {
    auto& s = shape;
    check.dimensions(q_name, q, 4, "[B, HQ, L, D]");
    s.B = size_of<Int>(q, 0), s.HQ = size_of<Int>(q, 1), s.L = size_of<Int>(q, 2);
    s.D = check_head_size(check, q_name, size_of<Int>(q, 3));
    s.key_code = check_codebook(check, "key_codebook", key.codebook);
    s.value_code = check_codebook(check, "value_codebook", value.codebook);
    check.is_int32("key_codes", key.codes).dimensions(4, "[B, HK, T, ceil(D * bits / 32)]");
    s.HK = size_of<Int>(key.codes, 1), s.T = size_of<Int>(key.codes, 2);
    check_heads(check, "key_codes", s.HK, q_name, s.HQ);

    const Sizes<Int> rows = {s.B, s.HK, s.T};
    check_codes(check, "key_codes", key.codes, rows, s.D, s.key_code);
    check_norms(check, "key_norms", key.norms, rows);
    check_codes(check, "value_codes", value.codes, rows, s.D, s.value_code);
    check_norms(check, "value_norms", value.norms, rows);
    if (length.has_value()) check_length(check, *length);
    if (key.tile_means.has_value()) check_tile_means(check, "key_tile_means", *key.tile_means, s.B, s.HK, s.T, s.D);
    check_exact(check, q, exact);
    check_visibility(check);
  }

 private:
  void check_length(const Check<Int>& check, const Int& length) {
    check.value(sym_ge(length, Int(0)), "length", "at least 0", length);
    check.value(sym_le(length, shape.T), "length", "at most the tokens of key_codes", length, " for ", shape.T);
    shape.T = length;
  }

  void check_exact_rows(const Check<Int>& check, const char* argument, const Tensor& x, const Int& rows,
                        const Tensor& q) const {
    check.shape(argument, x, "[B, HK, rows, D]", {shape.B, shape.HK, rows, shape.D});
    check.same_dtype(argument, x, "q", q);
  }

  void check_exact(const Check<Int>& check, const Tensor& q, const ExactRows<Int>& exact) {
    auto& s = shape;
    const auto& [keys, values, sinks, length] = exact;
    check.value(keys.has_value() == values.has_value(), "exact_values", "a tensor if exact_keys is one, else None",
                values.has_value() ? "a tensor" : "None");
    if (keys.has_value()) {
      check.dimensions("exact_keys", *keys, 4, "[B, HK, rows, D]");
      const Int rows = size_of<Int>(*keys, 2);
      check_exact_rows(check, "exact_keys", *keys, rows, q);
      check_exact_rows(check, "exact_values", *values, rows, q);
      s.E = length.value_or(rows);
      check.value(sym_ge(s.E, Int(0)), "exact_length", "at least 0", s.E);
      check.value(sym_le(s.E, rows), "exact_length", "at most the rows of exact_keys", s.E, " for ", rows);
    } else {
      check.value(!length.has_value(), "exact_length", "None without exact_keys", length.value_or(Int(0)));
    }
    check.value(sym_ge(sinks, Int(0)), "exact_sinks", "at least 0", sinks);
    check.value(sym_le(sinks, s.E), "exact_sinks", "at most the exact rows", sinks, " for ", s.E);
    s.S = sinks;
  }

  void check_visibility(const Check<Int>& check) {
    const auto& [starts, causal, q_offset, window] = visibility;
    if (starts.has_value()) {
      check_index(check, "starts", *starts);
      check.shape("starts", *starts, "[B]", {shape.B});
    }
    const Int tokens = shape.T + shape.E;
    check.value(sym_le(tokens, Int(kLargestPosition)), "key_codes", "fewer than 2^30 tokens", tokens);
    shape.q_offset = q_offset.has_value() ? *q_offset : tokens - shape.L;
    check.in_range("q_offset", "a position below 2^30", shape.q_offset, -kLargestPosition, kLargestPosition);
    check.value(window >= 0 && window <= kLargestPosition, "window", "a window from 0 (none) to 2^30", window);
    check.value(window == 0 || causal, "window", "0 where causal is false", window);
  }
};

}  // namespace torch_gdn
