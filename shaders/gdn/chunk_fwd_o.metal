// Computes the outputs of a chunk from the state before it.
// A threadgroup owns one chunk of one value head. Simdgroup s of C/16 owns block rows s and C/8-1-s of the masked q
// k^T, then 16 columns of o at a time.
// Registers: o [C, 16].
// Threadgroup memory: the masked q k^T [C, C], which overlaps the slices of q and k that it is computed from; a slice
// of q and keys of h, then v_new, then o. o is written in whole rows, because a simdgroup's 16 columns are only a
// quarter of a 128-byte line.
// Layout: q and k [B, T, H, K] have row strides. v_new [B, T, HV, V] is contiguous. h [B, NT, HV, ...] has any strides
// of K and V. g_cumsum [B, T, HV] is f32. o [B, T, HV, V] has row strides, and is T or f32. Intermediate is T, or float
// if T is half, because a state may leave half's range.
// With c = g_cumsum:
//     o = scale ((q exp(c)) h + tril(q k^T exp(c_i - c_j)) v_new)
// If scores [B, T, HV, C] are given (f32, contiguous, zeros above the diagonal of a block of 8), the kernel does not
// read k and g_cumsum:
//     o = scale (q h + scores v_new)
#include "core/sequences.h"
#include "core/slots.h"
#include "gdn/parameters.h"
#include "gdn/triangle.h"

// The number of columns of q and k in threadgroup memory. They fill a 128-byte line.
template <typename T>
METAL_FUNC constexpr int slice_columns() {
  return 128 / int(sizeof(T));
}

// Returns how many rows of `row_bytes` fit in `bytes`: C or C / 2.
METAL_FUNC constexpr int rows_within(int bytes, int row_bytes, int C) { return C * row_bytes <= bytes ? C : C / 2; }

// Stages keys of a part of h, [keys, columns]. Either dimension may be contiguous. Elements past the end are zeros.
template <int Keys, int Columns, int Threads, typename T>
METAL_FUNC void stage_keys(
    threadgroup T* tile, device const T* source, StateStrides strides, int keys, int columns, uint thread_index) {
  const bool value_inner = strides.value <= strides.key;
  for (uint item = thread_index; item < uint(Keys * Columns); item += Threads) {
    const int key = int(value_inner ? item / uint(Columns) : item % uint(Keys));
    const int column = int(value_inner ? item % uint(Columns) : item / uint(Keys));
    const bool is_there = key < keys && column < columns;
    tile[key * tile_stride<T>(Columns) + column] =
        T(is_there ? float(source[key * strides.key + column * strides.value]) : 0.0f);
  }
}

template <int Rows, int Columns, int Threads, typename T>
METAL_FUNC void write_outputs(
    device T* target, threadgroup const float* tile, int64_t stride, int rows, int columns, uint thread_index) {
  for (uint item = thread_index; item < uint(Rows * Columns); item += Threads) {
    const int row = int(item / uint(Columns));
    const int column = int(item % uint(Columns));
    if (row < rows && column < columns) {
      target[row * stride + column] = T(tile[row * tile_stride<float>(Columns) + column]);
    }
  }
}

// Computes scores = tril(q k^T exp(c_i - c_j)). They may overlap `scratch`, which has 2 * C *
// tile_stride(slice_columns()) elements. The barriers of its slices precede the reads of chunk_g_cumsum. The caller's
// next barrier must precede the reads of the scores.
template <typename T, int K, int C, int Width>
METAL_FUNC void masked_scores(
    threadgroup float* scores,
    threadgroup T* scratch,
    threadgroup const float* chunk_g_cumsum,
    device const T* queries,
    int64_t query_stride,
    device const T* keys,
    int64_t key_stride,
    int tokens,
    uint thread_index,
    uint simdgroup,
    LanePosition at) {
  constexpr int kBlocks = C / 8;
  constexpr int kSlice = slice_columns<T>();
  constexpr int kStride = tile_stride<T>(kSlice);
  threadgroup T* query_tile = scratch;
  threadgroup T* key_tile = scratch + C * kStride;

  float2 products[kBlocks + 1];
  UNROLL for (int n = 0; n <= kBlocks; ++n) products[n] = float2(0.0f);
  for (int slice = 0; slice < K; slice += kSlice) {
    stage_rows<C, kSlice, Width, chunk_threads(C)>(
        query_tile, queries + slice, query_stride, tokens, K - slice, thread_index);
    stage_rows<C, kSlice, Width, chunk_threads(C)>(key_tile, keys + slice, key_stride, tokens, K - slice, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    add_lower_products<C, kSlice>(products, query_tile, key_tile, simdgroup, at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  UNROLL for (int n = 0; n <= kBlocks; ++n) {
    const BlockPosition block = own_block<C>(simdgroup, n);
    const int i = block.row * 8 + at.row;
    const int j = block.column * 8 + at.column;
    float2 score = float2(0.0f);
    if (i < tokens && i >= j) score.x = products[n].x * exp(chunk_g_cumsum[i] - chunk_g_cumsum[j]);
    if (i < tokens && i >= j + 1) score.y = products[n].y * exp(chunk_g_cumsum[i] - chunk_g_cumsum[j + 1]);
    store_even_fragment(scores + block.row * 8 * (C + 4) + block.column * 8, C + 4, at, score);
  }
}

template <typename T, typename Intermediate, int K, int V, int C, int Width, bool HasScores = false>
[[kernel]] void chunk_fwd_o(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const Intermediate* v_new [[buffer(2)]],
    device const Intermediate* h [[buffer(3)]],
    device const float* g_cumsum_or_scores [[buffer(4)]],
    device const int* cu_seqlens [[buffer(5)]],
    device const int* state_indices [[buffer(6)]],
    device T* o [[buffer(7)]],
    device ErrorLog* errors [[buffer(8)]],
    constant ChunkFwdOParameters& parameters [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(C == 16 || C == 32 || C == 64, "a chunk has 16, 32 or 64 tokens");
  static_assert(K >= 1 && K <= 256 && V >= 1 && V <= 512, "K is at most 256 and V at most 512");
  constexpr int kBlocks = C / 8;
  constexpr int kThreads = chunk_threads(C);
  constexpr int kSlice = slice_columns<T>();
  constexpr int kStride = tile_stride<T>(kSlice);
  constexpr int kTileBytes = C * kStride * int(sizeof(T));
  constexpr int kKeys = 64 / int(sizeof(Intermediate));  // keys of h in threadgroup memory
  static_assert(kSlice % kKeys == 0, "a slice of q is whole parts of h");
  constexpr int kValueStride = tile_stride<Intermediate>(C);
  constexpr int kValueRows = rows_within(kTileBytes, kValueStride * int(sizeof(Intermediate)), C);
  constexpr int kOutputStride = tile_stride<float>(C);
  constexpr int kOutputRows = rows_within(kTileBytes, kOutputStride * 4, C);
  static_assert(kOutputRows * kOutputStride * 4 <= kTileBytes, "rows of o lie in the tile");
  static_assert(kValueRows * kValueStride * int(sizeof(Intermediate)) <= kTileBytes, "rows of v_new lie in the tile");
  constexpr int kScoreStride = C + 4;
  constexpr int kScoreFloats = C * kScoreStride;
  constexpr int kScratchFloats = 2 * C * kStride * int(sizeof(T)) / 4;
  alignas(16) threadgroup float scores[kScoreFloats > kScratchFloats ? kScoreFloats : kScratchFloats];
  alignas(16) threadgroup float tile[kTileBytes / 4];  // q, then v_new, then o
  threadgroup T* query_tile = (threadgroup T*)tile;
  threadgroup Intermediate* value_tile = (threadgroup Intermediate*)tile;
  alignas(16) threadgroup Intermediate key_tile[kKeys * kValueStride];  // keys of h
  threadgroup float chunk_g_cumsum[C];

  const Chunk chunk = locate_own_chunk(cu_seqlens, parameters.sequence, group, C, errors, simdgroup, lane);
  // For a sequence without a slot, no token is read and o is zeros. This kernel does not read the flags.
  const Slot slot =
      locate_slot(state_indices, (device const uchar*)state_indices, parameters.slots, chunk.sequence, lane);
  const int tokens = slot.is_present ? chunk.tokens : 0;
  const LanePosition at = lane_position(lane);
  const int64_t head = int64_t(group.y);
  const int64_t key_head = key_head_of(int(group.y), parameters.heads);
  const int64_t value_heads = parameters.value_heads;
  const int64_t row = (int64_t(chunk.batch) * parameters.sequence.tokens + chunk.first) * value_heads + head;
  device const T* queries = q + offset_of(parameters.q, chunk.batch, chunk.first, key_head);
  if constexpr (HasScores) {
    UNROLL for (int n = 0; n <= kBlocks; ++n) {
      const BlockPosition block = own_block<C>(simdgroup, n);
      const int first = block.row * 8, column = block.column * 8;
      device const float* source = g_cumsum_or_scores + (row + first * value_heads) * C + column;
      store_even_fragment(
          scores + first * kScoreStride + column, kScoreStride, at,
          load_even_fragment(source, value_heads * C, tokens - first, at));
    }
  } else {
    const int64_t first_key = offset_of(parameters.k, chunk.batch, chunk.first, key_head);
    if (int(thread_index) < C) {
      chunk_g_cumsum[thread_index] =
          int(thread_index) < tokens ? g_cumsum_or_scores[row + int64_t(thread_index) * value_heads] : 0.0f;
    }
    masked_scores<T, K, C, Width>(
        scores, (threadgroup T*)scores, chunk_g_cumsum, queries, parameters.q.token, k + first_key, parameters.k.token,
        tokens, thread_index, simdgroup, at);
  }

  const int64_t first_output = offset_of(parameters.o, chunk.batch, chunk.first, head);
  device const Intermediate* state = h + chunk.row * parameters.h.sequence + head * parameters.h.head;
  for (int group_column = 0; group_column < V; group_column += C) {
    const int column = int(simdgroup) * 16;  // within the group of columns
    float2 sum[kBlocks][2];
    UNROLL for (int block = 0; block < kBlocks; ++block) sum[block][0] = sum[block][1] = float2(0.0f);

    // Adds q h.
    for (int key = 0; key < K; key += kKeys) {
      if (key % kSlice == 0) {
        stage_rows<C, kSlice, Width, kThreads>(
            query_tile, queries + key, parameters.q.token, tokens, K - key, thread_index);
      }
      stage_keys<kKeys, C, kThreads>(
          key_tile, state + key * parameters.h.key + group_column * parameters.h.value, parameters.h,
          tokens > 0 ? K - key : 0, V - group_column, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int depth = 0; depth < kKeys; depth += 8) {
        float2 states[2];
        UNROLL for (int side = 0; side < 2; ++side) {
          states[side] = load_even_fragment(key_tile + depth * kValueStride + column + side * 8, kValueStride, at);
        }
        UNROLL for (int block = 0; block < kBlocks; ++block) {
          const float2 query = load_even_fragment(query_tile + block * 8 * kStride + key % kSlice + depth, kStride, at);
          multiply_add(sum[block][0], query, states[0]);
          multiply_add(sum[block][1], query, states[1]);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if constexpr (!HasScores) {
      UNROLL for (int block = 0; block < kBlocks; ++block) {
        const float gate = exp(chunk_g_cumsum[block * 8 + at.row]);
        sum[block][0] *= gate;
        sum[block][1] *= gate;
      }
    }

    // Adds scores v_new.
    UNROLL for (int first = 0; first < C; first += kValueRows) {
      stage_rows<kValueRows, C, Width, kThreads>(
          value_tile, v_new + (row + first * value_heads) * V + group_column, value_heads * V, tokens - first,
          V - group_column, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL for (int depth = first / 8; depth < (first + kValueRows) / 8; ++depth) {
        float2 values[2];
        UNROLL for (int side = 0; side < 2; ++side) {
          values[side] =
              load_even_fragment(value_tile + (depth * 8 - first) * kValueStride + column + side * 8, kValueStride, at);
        }
        UNROLL for (int block = depth; block < kBlocks; ++block) {
          const float2 score = load_even_fragment(scores + block * 8 * kScoreStride + depth * 8, kScoreStride, at);
          multiply_add(sum[block][0], score, values[0]);
          multiply_add(sum[block][1], score, values[1]);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    UNROLL for (int first = 0; first < C; first += kOutputRows) {
      UNROLL for (int block = first / 8; block < (first + kOutputRows) / 8; ++block) {
        UNROLL for (int side = 0; side < 2; ++side) {
          store_even_fragment(
              tile + (block * 8 - first) * kOutputStride + column + side * 8, kOutputStride, at,
              parameters.scale * sum[block][side]);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const int64_t corner = first_output + first * parameters.o.token + group_column;
      const int rows = chunk.tokens - first;
      const int columns = V - group_column;
      if (parameters.output_is_f32 != 0) {
        write_outputs<kOutputRows, C, kThreads>(
            (device float*)o + corner, tile, parameters.o.token, rows, columns, thread_index);
      } else {
        write_outputs<kOutputRows, C, kThreads>(o + corner, tile, parameters.o.token, rows, columns, thread_index);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}
