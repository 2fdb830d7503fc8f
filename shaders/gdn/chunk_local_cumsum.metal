// A lane owns one value head of one chunk, and scans its tokens. A threadgroup owns kCumsumHeads heads, so that reads
// coalesce.
// Layout: g [B, T, HV] with any strides and float dtype, g_cumsum [B, T, HV] f32.
// Source: FLA's chunk_local_cumsum, which does not clamp.
#include "core/gates.h"
#include "core/sequences.h"
#include "gdn/parameters.h"

template <int C>
[[kernel]] void chunk_local_cumsum(
    device const uchar* g [[buffer(0)]],
    device const int* cu_seqlens [[buffer(1)]],
    device float* g_cumsum [[buffer(2)]],
    device ErrorLog* errors [[buffer(3)]],
    constant ChunkLocalCumsumParameters& parameters [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  static_assert(C == 16 || C == 32 || C == 64, "a chunk has 16, 32 or 64 tokens");
  const Chunk chunk = locate_own_chunk(cu_seqlens, parameters.sequence, group, C, errors, 0, lane);

  const int head = int(group.y * kCumsumHeads + lane);
  if (head < parameters.value_heads) {
    const int64_t first = int64_t(chunk.batch) * parameters.sequence.tokens + chunk.first;
    int64_t index = first * parameters.value_heads + head;
    float sum = 0.0f;
    for (int token = chunk.first; token < chunk.first + chunk.tokens; ++token, index += parameters.value_heads) {
      const float gate = read_float(g, offset_of(parameters.g, chunk.batch, token, head), parameters.g_type);
      sum += clamped_log_decay(gate);
      g_cumsum[index] = sum;
    }
  }
}
