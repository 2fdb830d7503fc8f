// Moves states [B, NT, HV, K, V] into the blocks of the gradients' kernels (chunk_bwd_segment.h), or back, for the ops
// of single stages. A threadgroup is one simdgroup, and owns one chunk of one value head. Blocks have zeros past K and
// V. A surplus chunk's state is zero.
#include "core/sequences.h"
#include "gdn/chunk_bwd.h"

template <bool FromBlocks>
[[kernel]] void chunk_bwd_states(
    device float* states [[buffer(0)]],
    device float* blocks [[buffer(1)]],
    device const int* cu_seqlens [[buffer(2)]],
    device ErrorLog* errors [[buffer(3)]],
    constant ChunkBwdMoveParameters& parameters [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_threadgroup]]) {
  const Chunk chunk = locate_own_chunk(cu_seqlens, parameters.sequence, group, kBwdChunk, errors, 0, lane);
  const int K = parameters.key_size, V = parameters.columns;
  const int64_t row = int64_t(group.z) * parameters.sequence.chunks + group.x;
  const int64_t matrix = row * parameters.value_heads + group.y;
  device float* state = states + matrix * K * V;
  device float* own = blocks + matrix * parameters.matrix_stride + int(lane) * 2;
  const LanePosition at = lane_position(lane);
  for (int column = 0; column < parameters.padded_columns; column += 8) {
    for (int key = 0; key < parameters.key_rows; key += 8, own += 64) {
      for (int n = 0; n < 2; ++n) {
        const int own_key = key + at.row, value = column + at.column + n;
        const bool is_inside = own_key < K && value < V;
        const int64_t place = int64_t(own_key) * V + value;
        if (FromBlocks && is_inside) state[place] = chunk.tokens > 0 ? own[n] : 0.0f;
        if (!FromBlocks) own[n] = is_inside && chunk.tokens > 0 ? state[place] : 0.0f;
      }
    }
  }
}
