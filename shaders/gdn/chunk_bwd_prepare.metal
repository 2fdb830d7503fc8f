// Writes a chunk in the matrix form of a delta rule, from which everything but the decays is the same for both rules:
//     r = v - k_read S - L u,  u = beta r,  o = q_read S + P u,  S <- last S + k_write^T u
// A threadgroup is one simdgroup, and owns one chunk of one value head. It takes 32 channels of K at a time: a lane
// owns a channel of all tokens, then half the channels of the products with one earlier token. Registers: 16 channels
// of k_j D(j, i). Threadgroup memory: q, k and exp(g) of 32 channels; L, P, and A, which is inverted. Layout: q and k
// [B, T, H, K], v and d_o [B, T, HV, V] with row strides; g [B, T, HV] or, with PerChannel, [B, T, HV, K], and beta [B,
// T, HV], f32; rstd [B, T, H] f32. The results have zeros past the tokens and columns. With Summed, g has the sum of a
// chunk's log decays up to each token. With Unit, beta is 1, and the inverse I. Let D(j, i) be the product of exp(g)
// after token j up to token i, and c the running sum of g. Then
//     q_read_i = q_i exp(c_i)   k_read_i = k_i exp(c_i)   k_write_i = k_i exp(c_last - c_i)
//     L_ij = sum_c k_i D(j, i) k_j for i > j   P_ij = sum_c q_i D(j, i) k_j for i >= j   inverse = (I + beta L)^-1
#include "gdn/chunk_bwd_segment.h"
#include "gdn/parameters.h"
#include "gdn/triangle.h"

GDN_CONSTANT int kStride = kBwdSlice + 4;
GDN_CONSTANT int kOwn = kBwdSlice / 2;  // channels of a lane in the products

// Adds the products of 32 channels to L and P. A lane and its neighbour own token j.
template <bool PerChannel>
METAL_FUNC void add_products(
    threadgroup float* L,
    threadgroup float* P,
    threadgroup const float* queries,
    threadgroup const float* keys,
    threadgroup const float* decays,
    uint lane) {
  const int j = int(lane / 2);
  const int column = int(lane % 2) * kOwn;
  float left[kOwn];
  UNROLL for (int c = 0; c < kOwn; ++c) left[c] = keys[j * kStride + column + c];
  float passed = 1.0f;
  for (int i = 0; i < kBwdChunk; ++i) {
    threadgroup const float* key = keys + i * kStride + column;
    threadgroup const float* query = queries + i * kStride + column;
    threadgroup const float* decay = decays + i * kStride + column;
    if (!PerChannel) passed *= i > j ? decay[0] : 1.0f;
    float k_sum = 0.0f, q_sum = 0.0f;
    UNROLL for (int c = 0; c < kOwn; ++c) {
      if (PerChannel) left[c] *= i > j ? decay[c] : 1.0f;
      k_sum += key[c] * left[c];
      q_sum += query[c] * left[c];
    }
    k_sum = passed * (k_sum + simd_shuffle_xor(k_sum, ushort(1)));
    q_sum = passed * (q_sum + simd_shuffle_xor(q_sum, ushort(1)));
    if (lane % 2 == 0 && i > j) L[i * kBwdChunk + j] += k_sum;
    if (lane % 2 == 1 && i >= j) P[i * kBwdChunk + j] += q_sum;
  }
}

template <typename T, bool PerChannel = false, bool Summed = false, bool Unit = false>
[[kernel]] void chunk_bwd_prepare(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]],
    device const T* d_o [[buffer(3)]],
    device const float* g [[buffer(4)]],
    device const float* beta [[buffer(5)]],
    device const float* q_rstd [[buffer(6)]],
    device const float* k_rstd [[buffer(7)]],
    device const int* cu_seqlens [[buffer(8)]],
    device float* keys [[buffer(9)]],
    device float* values [[buffer(10)]],
    device float* squares [[buffer(11)]],
    device float* channels [[buffer(12)]],
    device float* betas [[buffer(13)]],
    device ErrorLog* errors [[buffer(14)]],
    constant ChunkBwdParameters& parameters [[buffer(15)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_threadgroup]]) {
  static_assert(chunk_threads(kBwdChunk) == 32 && kBwdSlice == 32, "a lane owns a channel, and half an earlier token");
  alignas(16) threadgroup float query_tile[kBwdChunk * kStride];
  alignas(16) threadgroup float key_tile[kBwdChunk * kStride];
  alignas(16) threadgroup float decay_tile[kBwdChunk * kStride];
  threadgroup float L[kBwdChunk * kBwdChunk];
  threadgroup float P[kBwdChunk * kBwdChunk];
  alignas(16) threadgroup float triangle[triangle_floats<kBwdChunk>()];

  const Chunk chunk = own_chunk(cu_seqlens, parameters, group.x, group.z, lane);
  if (parameters.first_row == 0 && group.x == 0 && group.y == 0 && group.z == 0) {
    report_cu_seqlens(cu_seqlens, parameters.sequence, 0, errors, lane);
  }
  const int64_t head = group.y;
  const int64_t key_head = key_head_of(int(group.y), parameters.heads);
  const int64_t batch = chunk.batch;
  const int64_t first = chunk.first;
  const int64_t matrices = matrices_of(parameters, int64_t(group.z), int64_t(group.x), head);
  const int64_t columns = parameters.key_columns;
  device const T* queries = q + offset_of(parameters.q, batch, first, key_head);
  device const T* own_keys = k + offset_of(parameters.k, batch, first, key_head);
  device const float* gates = g + offset_of(parameters.g, batch, first, head);
  const int64_t norm = (batch * parameters.sequence.tokens + first) * parameters.key_heads + key_head;
  const bool is_normalised = parameters.is_normalised != 0;

  for (int item = int(lane); item < kBwdChunk * kBwdChunk; item += 32) {
    L[item] = 0.0f;
    P[item] = 0.0f;
  }
  for (int slice = 0; slice < int(columns); slice += kBwdSlice) {
    const int channel = slice + int(lane);
    device float* rows = keys + key_plane(parameters, matrices, 0) + channel;
    const int64_t plane = kBwdChunk * columns;
    float sum = 0.0f;
    for (int i = 0; i < kBwdChunk; ++i) {
      const bool is_there = i < chunk.tokens && channel < parameters.key_size;
      float query = 0.0f, key = 0.0f, log_decay = 0.0f;
      if (is_there) {
        const int64_t row = norm + int64_t(i) * parameters.key_heads;
        query = parameters.scale * float(queries[i * parameters.q.token + channel]);
        query *= is_normalised ? q_rstd[row] : 1.0f;
        key = float(own_keys[i * parameters.k.token + channel]) * (is_normalised ? k_rstd[row] : 1.0f);
        log_decay = log_decay_of<Summed>(gates + (PerChannel ? channel : 0), parameters.g.token, i);
      } else if (!PerChannel && i < chunk.tokens) {
        log_decay = log_decay_of<Summed>(gates, parameters.g.token, i);
      }
      sum += log_decay;
      const float read = gate_exp(sum);
      query_tile[i * kStride + int(lane)] = query;
      key_tile[i * kStride + int(lane)] = key;
      decay_tile[i * kStride + int(lane)] = log_decay;
      rows[kBwdQ * plane + i * columns] = query;
      rows[kBwdK * plane + i * columns] = key;
      rows[kBwdQRead * plane + i * columns] = query * read;
      rows[kBwdKRead * plane + i * columns] = key * read;
    }
    channels[channel_plane(parameters, matrices, kBwdLast) + channel] = sum;
    float left = 0.0f;
    for (int i = kBwdChunk - 1; i >= 0; --i) {
      const int place = i * kStride + int(lane);
      rows[kBwdKWrite * plane + i * columns] = key_tile[place] * gate_exp(left);
      left += decay_tile[place];
      decay_tile[place] = gate_exp(decay_tile[place]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    add_products<PerChannel>(L, P, query_tile, key_tile, decay_tile, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  device const float* own_beta = beta + offset_of(parameters.beta, batch, first, head);
  const int token = int(lane) % kBwdChunk;
  const float token_beta = token >= chunk.tokens ? 0.0f : Unit ? 1.0f : own_beta[token * parameters.beta.token];
  if (int(lane) < kBwdChunk) betas[matrices * kBwdChunk + int(lane)] = token_beta;
  for (int start = 0; start < kBwdChunk * kBwdChunk; start += 32) {
    const int item = start + int(lane);
    const int i = item / kBwdChunk;
    const int j = item % kBwdChunk;
    const float row_beta = simd_shuffle(token_beta, ushort(i));
    if (i / 8 >= j / 8) triangle[triangle_element(i, j)] = Unit ? 0.0f : row_beta * L[item];
    squares[square_plane(matrices, kBwdL) + item] = L[item];
    squares[square_plane(matrices, kBwdP) + item] = P[item];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  invert_triangle<kBwdChunk>(triangle, lane, 0, lane_position(lane));
  for (int item = int(lane); item < kBwdChunk * kBwdChunk; item += 32) {
    const int i = item / kBwdChunk;
    const int j = item % kBwdChunk;
    squares[square_plane(matrices, kBwdInverse) + item] = i >= j ? triangle[triangle_element(i, j)] : 0.0f;
  }

  const int value_columns = parameters.value_columns;
  device float* own_values = values + value_plane(parameters, matrices, kBwdR);
  device float* own_gradients = values + value_plane(parameters, matrices, kBwdDo);
  device const T* inputs = v + offset_of(parameters.v, batch, first, head);
  device const T* outer = d_o + offset_of(parameters.d_o, batch, first, head);
  for (int i = 0; i < kBwdChunk; ++i) {
    for (int column = int(lane); column < value_columns; column += 32) {
      const bool is_there = i < chunk.tokens && column < parameters.value_size;
      const int64_t place = int64_t(i) * value_columns + column;
      own_values[place] = is_there ? float(inputs[i * parameters.v.token + column]) : 0.0f;
      own_gradients[place] = is_there ? float(outer[i * parameters.d_o.token + column]) : 0.0f;
    }
  }
}
