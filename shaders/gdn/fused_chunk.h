// The fused chunk kernels share this code. It loads a chunk's tokens and stores the output.
#pragma once
#include "core/gates.h"
#include "core/parameters.h"
#include "core/tile.h"
#include "gdn/parameters.h"
#include "gdn/state_blocks.h"
#include "gdn/state_threadgroup.h"

GDN_CONSTANT int kValueStride = kStateColumns + 4;  // puts each row 4 banks further

// A simdgroup's tokens of a chunk, which are every fourth token. For each token, a lane holds vectors of q and k and
// one column of v. Lane i of simdgroup 0 holds the bits of token i's gate and beta.
template <typename T, typename Vector, int Rounds, int Vectors>
struct Tokens {
  Vector queries[Rounds][Vectors];
  Vector keys[Rounds][Vectors];
  T values[Rounds];
  uint gate, beta;
};

// Points to q, k and v of one head and batch row, at the first token.
template <typename T>
struct Sources {
  device const T* q;
  device const T* k;
  device const T* v;
  device const uchar* g;
  device const uchar* beta;
  int64_t batch, head;
  int values;  // number of columns of v
};

template <typename T>
METAL_FUNC Sources<T> sources_of(
    device const T* q,
    device const T* k,
    device const T* v,
    device const uchar* g,
    device const uchar* beta,
    constant FusedChunkParameters& parameters,
    StateThreadgroup own) {
  const int64_t batch = own.sequence.batch;
  q += batch * parameters.q.batch + own.key_head * parameters.q.head;
  k += batch * parameters.k.batch + own.key_head * parameters.k.head;
  v += batch * parameters.v.batch + own.head * parameters.v.head + own.first_value;
  return {q, k, v, g, beta, batch, own.head, own.values};
}

template <int K, int Vectors, int Width, typename Vector, typename T>
METAL_FUNC void load_row(thread Vector* vectors, device const T* source, bool is_there, uint lane) {
  UNROLL for (int n = 0; n < Vectors; ++n) {
    const int column = (n * 32 + int(lane)) * Width;
    vectors[n] = is_there && column < K ? Vector(*(device const Vector*)(source + column)) : Vector(T(0));
  }
}

template <int Padded, int Vectors, int Width, typename Vector, typename T>
METAL_FUNC void store_row(threadgroup T* target, thread const Vector* vectors, uint lane) {
  UNROLL for (int n = 0; n < Vectors; ++n) {
    const int column = (n * 32 + int(lane)) * Width;
    if (column < Padded) *(threadgroup Vector*)(target + column) = vectors[n];
  }
}

// Returns 1 / ||x|| of a row. The lanes of the simdgroup add up the squares.
template <int Vectors, int Width, typename Vector>
METAL_FUNC float inverse_norm(thread const Vector* vectors) {
  float sum = 0.0f;
  UNROLL for (int n = 0; n < Vectors; ++n) {
    if constexpr (Width == 1) {
      sum += float(vectors[n]) * float(vectors[n]);
    } else {
      UNROLL for (int e = 0; e < Width; ++e) sum += float(vectors[n][e]) * float(vectors[n][e]);
    }
  }
  return rsqrt(simd_sum(sum) + kNormEps);
}

// Loads tokens [first, first + C). Only the first `count` of them exist. A rule with gates of channels has no g here.
template <int K, int Width, typename Vector, int Rounds, int Vectors, typename T>
METAL_FUNC void load_tokens(
    thread Tokens<T, Vector, Rounds, Vectors>& tokens,
    Sources<T> from,
    constant FusedChunkParameters& parameters,
    int first,
    int count,
    uint lane,
    uint simdgroup) {
  tokens.gate = tokens.beta = 0u;
  if (simdgroup == 0 && int(lane) < min(Rounds * kSimdgroups, count)) {
    tokens.gate = gate_bits_at(from.g, parameters.gates, from.batch, first + int(lane), from.head);
    tokens.beta = beta_bits_at(from.beta, parameters.gates, from.batch, first + int(lane), from.head);
  }
  UNROLL for (int round = 0; round < Rounds; ++round) {
    const int row = round * kSimdgroups + int(simdgroup);
    const int64_t token = first + row;
    const bool is_there = row < count;
    load_row<K, Vectors, Width>(tokens.queries[round], from.q + token * parameters.q.token, is_there, lane);
    load_row<K, Vectors, Width>(tokens.keys[round], from.k + token * parameters.k.token, is_there, lane);
    tokens.values[round] =
        is_there && int(lane) < from.values ? T(from.v[token * parameters.v.token + int(lane)]) : T(0.0f);
  }
}

// Stores the `values` columns of a chunk's tokens before `last`. The lane that reads a column of v also stores that
// column of o.
template <int C, typename T>
METAL_FUNC void write_outputs(
    device T* o,
    threadgroup const float* tile,
    int64_t first_output,
    constant FusedChunkParameters& parameters,
    int first,
    int last,
    int values,
    uint lane,
    uint simdgroup) {
  UNROLL for (int round = 0; round < C / kSimdgroups; ++round) {
    const int row = round * kSimdgroups + int(simdgroup);
    if (first + row < last && int(lane) < values) {
      const int64_t element = first_output + (first + row) * parameters.o.token + int64_t(lane);
      const float output = tile[row * kValueStride + int(lane)];
      if (parameters.output_is_f32 != 0) {
        ((device float*)o)[element] = output;
      } else {
        o[element] = T(output);
      }
    }
  }
}
