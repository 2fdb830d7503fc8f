// What the fused chunk kernels share: their state, whose 32 columns go through threadgroup memory, the loads of a
// chunk's tokens, substitution within 8 rows, and the output.
#pragma once
#include "core/fragment.h"
#include "core/gates.h"
#include "core/norm_eps.h"
#include "core/tile.h"
#include "gdn/fused_chunk_gated_delta_rule.h"

GDN_CONSTANT int kSimdgroups = kStateThreads / 32;
GDN_CONSTANT int kValueStride = kStateColumns + 4;  // 4 banks further each row
GDN_CONSTANT int kScratchStride = kStateColumns + 1;

// Keys of S that `floats` of threadgroup memory hold: whole 128-byte lines where possible.
METAL_FUNC constexpr int staged_keys(int floats) {
  return floats >= 64 * kScratchStride   ? 64
         : floats >= 32 * kScratchStride ? 32
         : floats >= 16 * kScratchStride ? 16
                                         : 8;
}

// The element of a [keys, 32] part of S that item `item` moves, so that lanes access neighbours in memory.
struct StateItem {
  int key, value;
};

METAL_FUNC StateItem state_item(int item, int keys, bool value_inner) {
  StateItem at;
  at.key = value_inner ? item / kStateColumns : item % keys;
  at.value = value_inner ? item % kStateColumns : item / keys;
  return at;
}

// S [K, 32] through `scratch`: a simdgroup reads 128 contiguous bytes in either layout.
template <int K, int Keys, typename P>
METAL_FUNC void load_state(
    thread float2* state,
    device const P* source,
    StateStrides strides,
    int values,
    threadgroup float* scratch,
    uint thread_index,
    uint simdgroup,
    LanePosition at) {
  UNROLL for (int first = 0; first < K; first += Keys) {
    for (int item = int(thread_index); item < Keys * kStateColumns; item += kSimdgroups * 32) {
      const StateItem of = state_item(item, Keys, strides.value <= strides.key);
      const bool inside = first + of.key < K && of.value < values;
      scratch[of.key * kScratchStride + of.value] =
          inside ? float(source[(first + of.key) * strides.key + of.value * strides.value]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int row = 0; row < Keys && first + row < K; row += 8) {
      state[(first + row) / 8] = load_fragment(scratch + row * kScratchStride + int(simdgroup) * 8, kScratchStride, at);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

template <int K, int Keys, typename P>
METAL_FUNC void store_state(
    thread const float2* state,
    device P* target,
    StateStrides strides,
    int values,
    threadgroup float* scratch,
    uint thread_index,
    uint simdgroup,
    LanePosition at) {
  UNROLL for (int first = 0; first < K; first += Keys) {
    UNROLL for (int row = 0; row < Keys && first + row < K; row += 8) {
      store_fragment(scratch + row * kScratchStride + int(simdgroup) * 8, kScratchStride, at, state[(first + row) / 8]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int item = int(thread_index); item < Keys * kStateColumns; item += kSimdgroups * 32) {
      const StateItem of = state_item(item, Keys, strides.value <= strides.key);
      if (first + of.key < K && of.value < values) {
        target[(first + of.key) * strides.key + of.value * strides.value] =
            P(scratch[of.key * kScratchStride + of.value]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// A simdgroup's tokens of a chunk, every fourth: a lane holds vectors of q and k and a column of v; beta as passed.
template <typename Vector, int Rounds, int Vectors>
struct Tokens {
  Vector queries[Rounds][Vectors];
  Vector keys[Rounds][Vectors];
  float values[Rounds];
  float betas[Rounds];
};

// q, k and v of a head of a batch row, at its first token.
template <typename T>
struct Sources {
  device const T* q;
  device const T* k;
  device const T* v;
  device const uchar* beta;
  int64_t batch, head;
  int values;  // columns of v
};

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

// 1 / ||x|| of a row over the simdgroup's lanes.
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

// x <- (I - L)^-1 x, L strictly lower triangular, 8 rows.
METAL_FUNC void substitute(float2 lower, thread float2& x, uint lane) {
  UNROLL for (int i = 0; i < 7; ++i) {
    // The lanes that hold L[row][i] and x[i][column]: lane_position() inverted.
    const ushort of_row = ushort((lane & 0x16) | ((i >> 2) << 3) | ((i >> 1) & 1));
    const ushort of_column = ushort((lane & 0x09) | ((i >> 2) << 4) | ((i & 3) << 1));
    const float factor = simd_shuffle(i % 2 == 0 ? lower.x : lower.y, of_row);
    x += factor * float2(simd_shuffle(x.x, of_column), simd_shuffle(x.y, of_column));
  }
}

// Tokens [first, first + C), the first `count` of which exist. All lanes read a token's beta: one cache line.
template <int K, int Width, typename Vector, int Rounds, int Vectors, typename T>
METAL_FUNC void load_tokens(
    thread Tokens<Vector, Rounds, Vectors>& tokens,
    Sources<T> from,
    constant FusedChunkParameters& parameters,
    int first,
    int count,
    uint lane,
    uint simdgroup) {
  UNROLL for (int round = 0; round < Rounds; ++round) {
    const int row = round * kSimdgroups + int(simdgroup);
    const int64_t token = first + row;
    const bool is_there = row < count;
    load_row<K, Vectors, Width>(tokens.queries[round], from.q + token * parameters.q.token, is_there, lane);
    load_row<K, Vectors, Width>(tokens.keys[round], from.k + token * parameters.k.token, is_there, lane);
    tokens.values[round] =
        is_there && int(lane) < from.values ? float(from.v[token * parameters.v.token + int(lane)]) : 0.0f;
    tokens.betas[round] = is_there ? raw_beta_at(from.beta, parameters.gates, from.batch, token, from.head, 0) : 0.0f;
  }
}

// The `values` columns of a chunk's tokens that are before `last`, each by the lane that reads its v.
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
