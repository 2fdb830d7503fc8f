// Sums dq and dk over the value heads of a key head, in their order, and takes the scale and the norm of q and k back.
// A simdgroup owns a token of a key head, first of q, then of k. A lane owns every 32nd channel. Registers: the
// channels of the sum and of the normalised row. Layout: keys as in chunk_bwd.h; q and k [B, T, H, K] with row strides,
// rstd [B, T, H] f32; dq and dk contiguous.
//     dy = scale sum_heads dy_head;  dx = rstd (dy - y sum(y dy)),  y = x rstd
#include "gdn/chunk_bwd.h"
#include "gdn/chunk_bwd_segment.h"

GDN_CONSTANT int kMost = 8;  // channels of a lane, for K of at most 256

template <typename T>
METAL_FUNC void write_gradient(
    device T* target,
    device const T* x,
    float rstd,
    float scale,
    device const float* sources,
    int64_t source_stride,
    constant ChunkBwdParameters& parameters,
    bool is_there,
    uint lane) {
  float dy[kMost], y[kMost];
  float along = 0.0f;
  UNROLL for (int n = 0; n < kMost; ++n) {
    const int channel = n * 32 + int(lane);
    dy[n] = 0.0f;
    y[n] = 0.0f;
    if (is_there && channel < parameters.key_size) {
      for (int member = 0; member < parameters.heads.members; ++member)
        dy[n] += sources[member * source_stride + channel];
      dy[n] *= scale;
      y[n] = parameters.is_normalised != 0 ? rstd * float(x[channel]) : 0.0f;
      along += y[n] * dy[n];
    }
  }
  along = simd_sum(along);
  UNROLL for (int n = 0; n < kMost; ++n) {
    const int channel = n * 32 + int(lane);
    if (is_there && channel < parameters.key_size) {
      target[channel] = T(parameters.is_normalised != 0 ? rstd * (dy[n] - y[n] * along) : dy[n]);
    }
  }
}

template <typename T>
[[kernel]] void chunk_bwd_keys(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const float* q_rstd [[buffer(2)]],
    device const float* k_rstd [[buffer(3)]],
    device const int* cu_seqlens [[buffer(4)]],
    device const float* keys [[buffer(5)]],
    device T* dq [[buffer(6)]],
    device T* dk [[buffer(7)]],
    constant ChunkBwdParameters& parameters [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const int row = int(group.x) / (kBwdChunk / kBwdKeysRows);
  const int i = int(group.x) % (kBwdChunk / kBwdKeysRows) * kBwdKeysRows + int(simdgroup);
  const Chunk chunk = own_chunk(cu_seqlens, parameters, uint(row), group.z, lane);
  const bool is_there = i < chunk.tokens;
  const int64_t key_head = group.y;
  const int64_t batch = chunk.batch;
  const int64_t token = int64_t(chunk.first) + i;
  const int64_t index = (batch * parameters.sequence.tokens + token) * parameters.key_heads + key_head;
  const bool reads_norm = is_there && parameters.is_normalised != 0;
  const int64_t matrices = matrices_of(parameters, int64_t(group.z), row, key_head * parameters.heads.divisor);
  const int64_t stride = parameters.heads.member_stride * key_plane(parameters, 1, 0);
  const int64_t place = int64_t(i) * parameters.key_columns;
  write_gradient(
      dq + index * parameters.key_size, q + offset_of(parameters.q, batch, token, key_head),
      reads_norm ? q_rstd[index] : 1.0f, parameters.scale, keys + key_plane(parameters, matrices, kBwdDq) + place,
      stride, parameters, is_there, lane);
  write_gradient(
      dk + index * parameters.key_size, k + offset_of(parameters.k, batch, token, key_head),
      reads_norm ? k_rstd[index] : 1.0f, 1.0f, keys + key_plane(parameters, matrices, kBwdDk) + place, stride,
      parameters, is_there, lane);
}
