// The sizes of ops over tokens, batched or packed. This also checks cu_seqlens and chunk_indices.
#pragma once
#include "ops/check.h"

namespace torch_gdn {

template <typename Int = int64_t>
struct ChunkShape {
  Int B = 0, T = 0, H = 0, HV = 0, K = 0, V = 0;  // 0 if the op has no such size
  Int N = 0;                                      // number of sequences: B, or len(cu_seqlens) - 1 when packed
  Int NT = 0;                                     // rows of h: chunks per batch row, or an upper bound when packed
  Int C = 0;                                      // tokens per chunk
  bool packed = false;
  bool tiled = false;  // if true, key head h serves value heads h, h + H, ...; if false, HV / H neighbours
};

constexpr int64_t kLargestK = 256, kLargestV = 512;
inline bool is_chunk_size(const c10::SymInt& size) { return size == 16 || size == 32 || size == 64; }

template <typename Int>
void check_chunk_size(const Check<Int>& check, int64_t size) {
  check.value(is_chunk_size(size), "chunk_size", "16, 32 or 64", size);
}

// Takes the chunk size from a matrix [.., chunk_size].
template <typename Int>
void check_chunk_columns(const Check<Int>& check, const char* argument, const Int& size) {
  check.value(is_chunk_size(size), argument, "a last dimension (the chunk size) of 16, 32 or 64", size);
}

template <typename Int>
void check_key_size(const Check<Int>& check, const char* argument, const Int& K) {
  static_assert(kLargestK == 256);
  check.in_range(argument, "K from 1 to 256", K, 1, kLargestK);
}

template <typename Int>
void check_value_size(const Check<Int>& check, const char* argument, const Int& V) {
  static_assert(kLargestV == 512);
  check.in_range(argument, "V from 1 to 512", V, 1, kLargestV);
}

template <typename Int>
void check_heads(const Check<Int>& check, const char* key, const Int& key_heads, const char* argument,
                 const Int& value_heads) {
  check.value(sym_ge(key_heads, Int(1)), key, "at least one head", key_heads);
  const bool multiple = holds(sym_ge(value_heads, Int(1))) && holds(sym_eq(value_heads % key_heads, Int(0)));
  TORCH_CHECK_VALUE(multiple, check.op(), ": ", argument, ": expected a number of heads that is a multiple of the ",
                    key_heads, " of ", key, ", got ", value_heads);
}

// Returns the shape of an op over keys [B, T, H, K] and values [B, T, HV, V], whose names are given.
template <typename Int>
ChunkShape<Int> shape_of(const Check<Int>& check, const char* key, const Tensor& k, const char* value, const Tensor& v,
                         const Int& chunk_size) {
  ChunkShape<Int> s{
      .B = size_of<Int>(k, 0), .T = size_of<Int>(k, 1), .H = size_of<Int>(k, 2), .HV = size_of<Int>(v, 2)};
  s.K = size_of<Int>(k, 3), s.V = size_of<Int>(v, 3), s.C = chunk_size;
  check_key_size(check, key, s.K);
  check_value_size(check, value, s.V);
  check_heads(check, key, s.H, value, s.HV);
  check.shape(value, v, "[B, T, HV, V]", {s.B, s.T, s.HV, s.V});
  return s;
}

// Checks the contents of cu_seqlens on the CPU. If cu_seqlens is on the device, the kernels check it.
void check_cu_seqlens(const char* op, const ChunkShape<>& s, const Tensor& cu_seqlens);

// Derives N, NT and packed from B, T and C. C is 0 for ops without chunks.
template <typename Int>
void check_sequences(const Check<Int>& check, ChunkShape<Int>& s, const optional<Tensor>& cu_seqlens,
                     const optional<Tensor>& chunk_indices = std::nullopt) {
  const bool chunked = s.C != 0;
  s.packed = cu_seqlens.has_value();
  s.N = s.B;
  s.NT = chunked ? ceil_div(s.T, s.C) : Int(0);
  check.value(s.packed || !chunk_indices.has_value(), "chunk_indices", "None when cu_seqlens is None", "a tensor");
  if (!s.packed) return;
  check.is_index_array("cu_seqlens", *cu_seqlens);
  check.value(cu_seqlens->dim() == 1 && holds(sym_ge(size_of<Int>(*cu_seqlens, 0), Int(1))), "cu_seqlens",
              "shape [N + 1]", sizes_of<Int>(*cu_seqlens));
  s.N = size_of<Int>(*cu_seqlens, 0) - 1;
  check.value(sym_eq(s.B, Int(1)), "cu_seqlens", "a batch of 1 (sequences packed along T)", "a batch of ", s.B);
  if (chunked) s.NT += s.N;
  if (chunk_indices.has_value()) {
    check.is_index_array("chunk_indices", *chunk_indices);
    check.value(chunk_indices->dim() == 2 && holds(sym_eq(size_of<Int>(*chunk_indices, 1), Int(2))), "chunk_indices",
                "shape [NT, 2]", sizes_of<Int>(*chunk_indices));
    s.NT = size_of<Int>(*chunk_indices, 0);
  }
  if constexpr (is_run<Int>) check_cu_seqlens(check.op(), s, *cu_seqlens);
}

// Checks that sequences have at most `most` tokens. If cu_seqlens is on the device, the kernels check it.
void check_sequence_lengths(const char* op, const char* argument, const char* expected, const ChunkShape<>& s,
                            const optional<Tensor>& cu_seqlens, int64_t most);

template <typename Int>
void check_tokens_of_sequences(const Check<Int>& check, const char* argument, const char* expected,
                               const ChunkShape<Int>& s, const optional<Tensor>& cu_seqlens, const Int& most) {
  if (!s.packed) {
    check.value(sym_le(s.T, most), argument, expected, most, " for ", s.T, " tokens");
  } else if constexpr (is_run<Int>) {
    check_sequence_lengths(check.op(), argument, expected, s, cu_seqlens, most);
  }
}

// Copies a tensor whose last stride is not 1. With a name, it warns once. Kernels accept any other strides.
Tensor unit_last_stride(const Tensor& x, const char* name = nullptr);

inline double scale_or_default(optional<double> scale, int64_t K) {
  return scale.value_or(1.0 / std::sqrt(static_cast<double>(K)));
}

}  // namespace torch_gdn
