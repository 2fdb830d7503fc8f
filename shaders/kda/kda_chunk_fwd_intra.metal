// The chunk_fwd_intra of Kimi Delta Attention. It also computes what chunk_fwd_h and chunk_fwd_o read instead of q, k
// and g.
// A threadgroup owns one chunk of one value head, and processes 16 channels at a time. A thread owns one channel of 8
// tokens. Simdgroup s of C/16 owns block rows s and C/8-1-s of both matrices.
// Registers: k k^T and q k^T with their decays.
// Threadgroup memory: q, k and decays of the 16 channels, f32, then slices of v, u or w; A, which is inverted in place.
// Layout: q and k [B, T, H, K] and v [B, T, HV, V] have row strides. g [B, T, HV, K] has row strides, and beta
// [B, T, HV] any strides; both have any float dtype, and may be raw. decayed_q and decayed_k [B, T, HV, K] are of type
// T, and scores [B, T, HV, C] f32. w [B, T, HV, K] and u [B, T, HV, V] have the type Intermediate, which is T, or float
// if T is half. log_decays [B, NT, HV, K] are f32.
// Tokens are counted from 1. Let e = exp(g), and let D(j, i) be the product of e after token j up to token i, a vector
// over channels. Then
//     decayed_q_i = q_i D(0, i)
//     decayed_k_i = k_i D(i, C)
//     scores_ij = sum_c q_i D(j, i) k_j         for i >= j
//     A_ij = beta_i sum_c k_i D(j, i) k_j       for i > j
//     u = (I + A)^-1 (beta v)
//     w = (I + A)^-1 (beta k D(0, i))
// Within 8 tokens, D(j, i) is accumulated token by token. Across blocks it is the product of D(j, end of its block), of
// the blocks between, and of D(start of its block, i). All factors are at most 1, so nothing overflows, and no factor
// is a quotient.
#include "core/gates.h"
#include "core/sequences.h"
#include "gdn/parameters.h"
#include "gdn/triangle.h"
#include "kda/channel_gates.h"
#include "kda/parameters.h"

GDN_CONSTANT int kSlice = 16;  // channels in threadgroup memory, 4 per lane
GDN_CONSTANT int kStride = kSlice + 4;

// The simdgroup's two diagonal blocks, in the lane's channels: k_i D(j, i) k_j and q_i D(j, i) k_j. A lane holds column
// c = lane / 4 of the low block from its diagonal down, then column 7 - c of the high block: 9 elements in every lane.
struct DiagonalColumns {
  float keys[9];
  float queries[9];
};

struct DiagonalElement {
  bool is_low;
  int row;
  int column;
};

METAL_FUNC DiagonalElement diagonal_element(int n, uint lane) {
  const int column = int(lane / 4);
  if (n < 8 - column) return {true, column + n, column};
  return {false, n - 1, 7 - column};
}

// `low` and `high` are the rows of q of the two blocks. The tiles of q, k and e are `tile` floats apart.
METAL_FUNC void add_diagonals(
    thread DiagonalColumns& sums, threadgroup const float* low, threadgroup const float* high, int tile, uint lane) {
  const int column = int(lane / 4);
  threadgroup const float* query = low + column * kStride + lane % 4 * 4;
  high += (7 - column) * kStride + lane % 4 * 4;
  float4 decayed = float4(0.0f);
  UNROLL for (int n = 0; n < 9; ++n) {
    if (n == 8 - column) query = high;
    const float4 key = *(threadgroup const float4*)(query + tile);
    decayed *= *(threadgroup const float4*)(query + 2 * tile);
    if (n == 0 || n == 8 - column) decayed = key;
    if (n > 0) sums.keys[n] += dot(decayed, key);
    sums.queries[n] += dot(decayed, *(threadgroup const float4*)query);
    query += kStride;
  }
}

// Returns block n of the C/8-1 blocks below the diagonal that a simdgroup owns: first those of the low row, then those
// of the high row.
template <int C>
METAL_FUNC BlockPosition lower_block(uint simdgroup, int n) {
  return own_block<C>(simdgroup, n < int(simdgroup) ? n : n + 1);
}

// Computes the simdgroup's blocks below the diagonal, over the channels of a slice. For blocks of 8 tokens, the tiles
// hold q D(0, i), k D(0, i) and k D(i, 8), and block_decays holds D(0, 8).
template <int C>
METAL_FUNC void add_lower_blocks(
    thread float2* key_products,
    thread float2* query_products,
    threadgroup const float* queries,
    threadgroup const float* block_decays,
    uint simdgroup,
    LanePosition at) {
  threadgroup const float* keys = queries + C * kStride;
  threadgroup const float* others = keys + C * kStride;
  constexpr int kDepths = kSlice / 8;
  float2 query[kDepths];
  float2 key[kDepths];
  UNROLL for (int depth = 0; depth < kDepths; ++depth) query[depth] = key[depth] = float2(0.0f);
  int column = 0;
  UNROLL for (int n = C / 8 - 2; n >= 0; --n) {  // each row from its diagonal on
    if (n == C / 8 - 2 || n + 1 == int(simdgroup)) {
      column = n + 1 == int(simdgroup) ? int(simdgroup) : C / 8 - 1 - int(simdgroup);
      UNROLL for (int depth = 0; depth < kDepths; ++depth) {
        query[depth] = load_even_fragment(queries + column * 8 * kStride + depth * 8, kStride, at);
        key[depth] = load_even_fragment(keys + column * 8 * kStride + depth * 8, kStride, at);
      }
    }
    column -= 1;
    UNROLL for (int depth = 0; depth < kDepths; ++depth) {
      const float2 other = load_transposed(others + column * 8 * kStride + depth * 8, kStride, at);
      float2 product = float2(0.0f);
      multiply_add(product, key[depth], other);
      key_products[n] += product;
      multiply_add(query_products[n], query[depth], other);
      const float2 between = *(threadgroup const float2*)(block_decays + column * kSlice + depth * 8 + at.column);
      query[depth] *= between;
      key[depth] *= between;
    }
  }
}

METAL_FUNC float sum_of_four(float x) {
  const float half_sum = x + simd_shuffle_xor(x, ushort(1));
  return half_sum + simd_shuffle_xor(half_sum, ushort(2));
}

// Sums over the lanes of a column. One of these lanes stores the result. It also writes zeros above the diagonal of the
// scores; no code reads A there.
template <int C>
METAL_FUNC void store_diagonals(
    threadgroup float* triangle,
    device float* scores,
    int64_t score_stride,
    thread const DiagonalColumns& sums,
    threadgroup const float* betas,
    int tokens,
    uint lane,
    uint simdgroup) {
  const int low = int(simdgroup) * 8;
  const int high = C - 8 - low;
  UNROLL for (int n = 0; n < 9; ++n) {
    const float key = sum_of_four(sums.keys[n]);
    const float query = sum_of_four(sums.queries[n]);
    const DiagonalElement element = diagonal_element(n, lane);
    const int first = element.is_low ? low : high;
    const int i = first + element.row;
    const int j = first + element.column;
    if (lane % 4 == 0) {
      if (n > 0) triangle[triangle_element(i, j)] = betas[i] * key;
      if (i < tokens) scores[i * score_stride + j] = query;
    }
  }
  const int column = int(lane / 4);
  // The rows above the diagonal: c in the low block, 7 - c in the high block.
  for (int n = int(lane % 4); n < 7; n += 4) {
    const int i = n < column ? low + n : high + n - column;
    const int j = n < column ? low + column : high + 7 - column;
    if (i < tokens) scores[i * score_stride + j] = 0.0f;
  }
}

// Reads a column of 8 tokens as f32. A token or channel that does not exist is zero.
template <typename T>
METAL_FUNC void load_column(threadgroup float* tile, device const T* source, int64_t stride, int count) {
  UNROLL for (int row = 0; row < 8; ++row) tile[row * kStride] = row < count ? float(source[row * stride]) : 0.0f;
}

template <typename T, typename Intermediate, int K, int V, int C, int Width>
[[kernel]] void kda_chunk_fwd_intra(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]],
    device const uchar* g [[buffer(3)]],
    device const uchar* beta [[buffer(4)]],
    device const uchar* A_log [[buffer(5)]],
    device const uchar* dt_bias [[buffer(6)]],
    device const int* cu_seqlens [[buffer(7)]],
    device T* decayed_q [[buffer(8)]],
    device T* decayed_k [[buffer(9)]],
    device float* scores [[buffer(10)]],
    device float* log_decays [[buffer(11)]],
    device Intermediate* w [[buffer(12)]],
    device Intermediate* u [[buffer(13)]],
    device ErrorLog* errors [[buffer(14)]],
    constant KdaChunkFwdIntraParameters& parameters [[buffer(15)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(C == 16 || C == 32 || C == 64, "a chunk has 16, 32 or 64 tokens");
  static_assert(K >= 1 && K <= 256 && V >= 1 && V <= 512, "K is at most 256 and V at most 512");
  constexpr int kBlocks = C / 8;
  constexpr int kThreads = chunk_threads(C);
  static_assert(kThreads == kBlocks * kSlice, "a thread has a channel of a block");
  constexpr int kSides = 4 / int(sizeof(T));
  constexpr int kColumns = C / 2 * kSides;
  constexpr int kTile = C * kStride;
  constexpr int kResultFloats = C * tile_stride<Intermediate>(kColumns) * int(sizeof(Intermediate)) / 4;
  constexpr int kTileFloats = kResultFloats > 3 * kTile ? kResultFloats : 3 * kTile;
  alignas(16) threadgroup float query_tile[kTileFloats];  // q, k and decays of 16 channels; then a slice of v, u or w
  threadgroup Intermediate* results = (threadgroup Intermediate*)query_tile;
  alignas(16) threadgroup float triangle[triangle_floats<C>()];
  alignas(16) threadgroup float block_decays[kBlocks * kSlice];
  threadgroup float block_sums[kBlocks * kSlice];
  threadgroup float betas[C];

  const Chunk chunk = locate_own_chunk(cu_seqlens, parameters.sequence, group, C, errors, simdgroup, lane);
  const LanePosition at = lane_position(lane);
  const int64_t head = int64_t(group.y);
  const int64_t key_head = key_head_of(int(group.y), parameters.heads);
  const int64_t value_heads = parameters.value_heads;
  const int64_t row = (int64_t(chunk.batch) * parameters.sequence.tokens + chunk.first) * value_heads + head;
  if (int(thread_index) < C) {
    const int token = int(thread_index);
    betas[token] =
        token < chunk.tokens ? beta_at(beta, parameters.gates, chunk.batch, chunk.first + token, head) : 0.0f;
  }

  const ChannelItem item = channel_item<kBlocks, kSlice>(thread_index);
  const int first = item.block * 8;
  const int64_t token = chunk.first + first;
  device const T* queries = q + (offset_of(parameters.q, chunk.batch, token, key_head) + item.channel);
  device const T* keys = k + (offset_of(parameters.k, chunk.batch, token, key_head) + item.channel);
  constant RowStrides& gate_strides = parameters.channel_gate.g;
  int64_t gates = offset_of(gate_strides, chunk.batch, token, head) + item.channel;
  threadgroup float* own = query_tile + first * kStride + item.channel;
  device float* decay_sum = log_decays + ((chunk.row * value_heads + head) * K + item.channel);
  float2 key_products[kBlocks - 1];
  float2 query_products[kBlocks - 1];
  UNROLL for (int n = 0; n < kBlocks - 1; ++n) key_products[n] = query_products[n] = float2(0.0f);
  DiagonalColumns diagonals;
  UNROLL for (int n = 0; n < 9; ++n) diagonals.keys[n] = diagonals.queries[n] = 0.0f;
  threadgroup const float* low_queries = query_tile + int(simdgroup) * 8 * kStride;
  threadgroup const float* high_queries = query_tile + (kBlocks - 1 - int(simdgroup)) * 8 * kStride;

  for (int slice = 0; slice < K; slice += kSlice) {
    const int channel = slice + item.channel;
    const int count = channel < K ? chunk.tokens - first : 0;
    float raw_gates[8];
    load_channel_gates<1>(raw_gates, g, parameters.channel_gate, &gates, &count);
    const ChannelGate gate = channel_gate_of(A_log, dt_bias, parameters.channel_gate, head, channel, K);
    load_column(own, queries, parameters.q.token, count);
    load_column(own + kTile, keys, parameters.k.token, count);
    const float sum = store_block_decays(own + 2 * kTile, kStride, raw_gates, gate, parameters.channel_gate, count);
    block_sums[thread_index] = sum;
    block_decays[thread_index] = gate_exp(sum);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    add_diagonals(diagonals, low_queries, high_queries, kTile, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    decay_block(own, kTile, kStride);

    float sum_before = 0.0f;
    float sum_after = 0.0f;
    for (int block = 0; block < kBlocks; ++block) {
      const float other = block_sums[block * kSlice + item.channel];
      if (block < item.block) sum_before += other;
      if (block > item.block) sum_after += other;
    }
    const float before = gate_exp(sum_before);
    const float after = gate_exp(sum_after);
    int64_t element = (row + first * value_heads) * K + channel;
    for (int i = 0; i < min(count, 8); ++i) {
      decayed_q[element] = T(own[i * kStride] * before);
      w[element] = Intermediate(own[kTile + i * kStride] * before);  // read again below
      decayed_k[element] = T(own[2 * kTile + i * kStride] * after);
      element += value_heads * K;
    }
    if (item.block == 0 && channel < K) *decay_sum = sum + sum_after;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    add_lower_blocks<C>(key_products, query_products, query_tile, block_decays, simdgroup, at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    queries += kSlice;
    keys += kSlice;
    gates += kSlice;
    decay_sum += kSlice;
  }

  device float* chunk_scores = scores + row * C;
  store_diagonals<C>(triangle, chunk_scores, value_heads * C, diagonals, betas, chunk.tokens, lane, simdgroup);
  UNROLL for (int n = 0; n < kBlocks - 1; ++n) {
    const BlockPosition block = lower_block<C>(simdgroup, n);
    const int token = block.row * 8;
    store_triangle(triangle, block.row, block.column, at, betas[token + at.row] * key_products[n]);
    store_even_fragment(
        chunk_scores + token * value_heads * C + block.column * 8, value_heads * C, chunk.tokens - token, at,
        query_products[n]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  invert_diagonal<C>(triangle, thread_index);
  threadgroup_barrier(mem_flags::mem_device);

  device const T* values = v + (offset_of(parameters.v, chunk.batch, chunk.first, head));
  for (int column = 0; column < V; column += kColumns) {
    solve_slice<C, kSides, kColumns, Width, kThreads>(
        u + row * V + column, value_heads * V, values + column, parameters.v.token, results, triangle, betas,
        chunk.tokens, V - column, thread_index, simdgroup, at);
  }
  for (int column = 0; column < K; column += kColumns) {
    device Intermediate* own_w = w + row * K + column;
    solve_slice<C, kSides, kColumns, Width, kThreads>(
        own_w, value_heads * K, (device const Intermediate*)own_w, value_heads * K, results, triangle, betas,
        chunk.tokens, K - column, thread_index, simdgroup, at);
  }
}
