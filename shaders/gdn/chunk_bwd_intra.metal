// Turns the gradients of a chunk's matrix form into those of q, k and the log decays of one value head, as the end of
// FLA's chunk_bwd_dqkwg, and as its chunk_kda_bwd_intra. A threadgroup owns one chunk of one value head; a thread owns
// a channel of all tokens. Registers: k, D(j, i), dk and dg of the channel. Threadgroup memory: dL and dP; the sums of
// dg over channels. Layout: keys, squares and channels as in chunk_bwd.h, where dq and dk replace dq_read and dk_read;
// g as in chunk_bwd_prepare.metal; dg [B, T, HV] or, with PerChannel, [B, T, HV, K] contiguous. A log decay of token t
// multiplies reads of the state from t on, writes before t to the state after the chunk, that state, and each product
// of a token from t on with one before t. No sum has a term that another one cancels:
//     dq_i = exp(c_i) dq_read_i + sum_j dP_ij D(j, i) k_j
//     dk_j = exp(c_j) dk_read_j + exp(c_last - c_j) dk_write_j + sum_i dL_ji D(i, j) k_i + sum_i x_ij
//     dg_t = dlast + sum_{i >= t} (reads of i) + sum_{i < t} (writes of i) + sum_{i >= t > j} x_ij k_j
// where x_ij = (dL_ij k_i + dP_ij q_i) D(j, i).
#include "gdn/chunk_bwd_walk.h"

template <int Threads, bool PerChannel = false, bool Summed = false>
[[kernel]] void chunk_bwd_intra(
    device const float* g [[buffer(0)]],
    device const int* cu_seqlens [[buffer(1)]],
    device const float* squares [[buffer(2)]],
    device const float* channels [[buffer(3)]],
    device float* keys [[buffer(4)]],
    device float* dg [[buffer(5)]],
    constant ChunkBwdParameters& parameters [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(Threads % kBwdSlice == 0 && Threads <= 256, "a thread owns a channel of a whole slice");
  constexpr int C = kBwdChunk;
  threadgroup float dL[C * C];
  threadgroup float dP[C * C];
  threadgroup float sums[C * 8];  // of each simdgroup's channels; K has at most 8 slices
  const Chunk chunk = own_chunk(cu_seqlens, parameters, group.x, group.z, lane);
  const int64_t head = group.y;
  const int64_t matrices = matrices_of(parameters, int64_t(group.z), int64_t(group.x), head);
  constexpr int64_t stride = Threads;
  const int channel = int(thread_index);
  for (int item = channel; item < C * C; item += Threads) {
    dL[item] = squares[square_plane(matrices, kBwdDL) + item];
    dP[item] = squares[square_plane(matrices, kBwdDP) + item];
  }
  device const float* gates =
      g + offset_of(parameters.g, chunk.batch, int64_t(chunk.first), head) + (PerChannel ? channel : 0);
  const bool has_gate = !PerChannel || channel < parameters.key_size;
  device float* rows = keys + key_plane(parameters, matrices, 0) + channel;
  const int64_t plane = C * stride;
  float log_decay[C], key[C], dk[C], dg_sums[C];
  UNROLL for (int i = 0; i < C; ++i) {
    log_decay[i] = has_gate && i < chunk.tokens ? log_decay_of<Summed>(gates, parameters.g.token, i) : 0.0f;
    key[i] = rows[kBwdK * plane + i * stride];
    dg_sums[i] = channels[channel_plane(parameters, matrices, kBwdDlast) + channel];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float after = 0.0f;
  UNROLL for (int i = C - 1; i >= 0; --i) {
    dk[i] = gate_exp(after) * rows[kBwdDkWrite * plane + i * stride];
    after += log_decay[i];
    UNROLL for (int t = i + 1; t < C; ++t) dg_sums[t] += key[i] * dk[i];
  }
  float before = 0.0f, left[C];
  UNROLL for (int i = 0; i < C; ++i) {
    before += log_decay[i];
    const float read = gate_exp(before), decay = gate_exp(log_decay[i]);
    const float query = rows[kBwdQ * plane + i * stride];
    const float dk_read = read * rows[kBwdDkRead * plane + i * stride];
    float dq = read * rows[kBwdDqRead * plane + i * stride];
    const float reads = query * dq + key[i] * dk_read;
    UNROLL for (int t = 0; t <= i; ++t) dg_sums[t] += reads;
    dq += dP[i * C + i] * key[i];
    dk[i] += dk_read + dP[i * C + i] * query;
    float products = 0.0f;
    UNROLL for (int j = 0; j < i; ++j) {
      const float dL_ij = dL[i * C + j], dP_ij = dP[i * C + j];
      left[j] *= decay;
      const float decayed = key[j] * left[j], pair = (dL_ij * key[i] + dP_ij * query) * left[j];
      dq += dP_ij * decayed;
      dk[i] += dL_ij * decayed;
      dk[j] += pair;
      products += pair * key[j];
      dg_sums[j + 1] += products;
    }
    left[i] = 1.0f;
    rows[kBwdDq * plane + i * stride] = dq;
  }
  UNROLL for (int i = 0; i < C; ++i) rows[kBwdDk * plane + i * stride] = dk[i];

  const int64_t value_heads = parameters.value_heads;
  const int64_t first = (int64_t(chunk.batch) * parameters.sequence.tokens + chunk.first) * value_heads + head;
  if constexpr (PerChannel) {
    UNROLL for (int i = 0; i < C; ++i) {
      if (i < chunk.tokens && channel < parameters.key_size) {
        dg[(first + i * value_heads) * parameters.key_size + channel] = dg_sums[i];
      }
    }
  } else {
    UNROLL for (int i = 0; i < C; ++i) {
      const float sum = simd_sum(dg_sums[i]);
      if (lane == 0) sums[int(simdgroup) * C + i] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (channel < chunk.tokens) {
      float sum = 0.0f;
      for (int n = 0; n < Threads / 32; ++n) sum += sums[n * C + channel];
      dg[first + channel * value_heads] = sum;
    }
  }
}
