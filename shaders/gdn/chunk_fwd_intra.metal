// Runs chunk_local_cumsum, chunk_scaled_dot_kkt, solve_tril and recompute_w_u in one kernel, without A in device
// memory.
// A threadgroup owns one chunk of some value heads of one key head. Simdgroup s of C/16 owns block rows s and C/8-1-s
// of k k^T, then 8 or 16 columns of u and w.
// Registers: k k^T for all heads. k is read again for each w.
// Threadgroup memory: A, which is inverted in place; a slice of k or v, then of w or u.
// Layout: k [B, T, H, K] and v [B, T, HV, V] have row strides. g and beta [B, T, HV] have any strides and float dtype,
// and may be raw. g_cumsum [B, T, HV] is f32. w [B, T, HV, K] and u [B, T, HV, V] have the type Intermediate, which is
// T, or float if T is half.
// With c = g_cumsum:
//     A_ij = beta_i (k_i . k_j) exp(c_i - c_j)  for i > j
//     u = (I + A)^-1 (beta v)
//     w = (I + A)^-1 (beta exp(c) k)
#include "core/gates.h"
#include "core/sequences.h"
#include "gdn/parameters.h"
#include "gdn/triangle.h"

template <typename T, typename Intermediate, int K, int V, int C, int Width>
[[kernel]] void chunk_fwd_intra(
    device const T* k [[buffer(0)]],
    device const T* v [[buffer(1)]],
    device const uchar* g [[buffer(2)]],
    device const uchar* beta [[buffer(3)]],
    device const uchar* A_log [[buffer(4)]],
    device const uchar* dt_bias [[buffer(5)]],
    device const int* cu_seqlens [[buffer(6)]],
    device float* g_cumsum [[buffer(7)]],
    device Intermediate* w [[buffer(8)]],
    device Intermediate* u [[buffer(9)]],
    device ErrorLog* errors [[buffer(10)]],
    constant ChunkFwdIntraParameters& parameters [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(C == 16 || C == 32 || C == 64, "a chunk has 16, 32 or 64 tokens");
  static_assert(K >= 1 && K <= 256 && V >= 1 && V <= 512, "K is at most 256 and V at most 512");
  constexpr int kBlocks = C / 8;
  constexpr int kThreads = chunk_threads(C);
  constexpr int kSides = 4 / int(sizeof(T));  // each side is 8 columns of a simdgroup
  constexpr int kColumns = C / 2 * kSides;    // per slice: 128 bytes per row at C = 64
  constexpr int kKeySlices = (K + kColumns - 1) / kColumns;
  constexpr int kValueSlices = (V + kColumns - 1) / kColumns;
  static_assert(sizeof(Intermediate) >= sizeof(T), "an intermediate has at least the size of an input");
  alignas(16) threadgroup Intermediate results[C * tile_stride<Intermediate>(kColumns)];
  threadgroup T* tile = (threadgroup T*)results;
  alignas(16) threadgroup float triangle[triangle_floats<C>()];
  threadgroup float chunk_g_cumsum[C];
  threadgroup float value_scale[C];
  threadgroup float key_scale[C];

  const Chunk chunk = locate_own_chunk(cu_seqlens, parameters.sequence, group, C, errors, simdgroup, lane);
  const LanePosition at = lane_position(lane);
  const int key_head = int(group.y) % parameters.heads.modulus;
  const int first_member = int(
      min(int64_t(int(group.y) / parameters.heads.modulus) * parameters.members, int64_t(parameters.heads.members)));
  device const T* keys = k + offset_of(parameters.k, chunk.batch, chunk.first, key_head);

  float2 products[kBlocks + 1];
  UNROLL for (int n = 0; n <= kBlocks; ++n) products[n] = float2(0.0f);
  for (int slice = 0; slice < kKeySlices; ++slice) {
    const int column = slice * kColumns;
    stage_rows<C, kColumns, Width, kThreads>(
        tile, keys + column, parameters.k.token, chunk.tokens, K - column, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    add_lower_products<C, kColumns>(products, tile, tile, simdgroup, at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  const int64_t value_heads = parameters.value_heads;
  const int64_t first_head =
      int64_t(key_head) * parameters.heads.divisor + int64_t(first_member) * parameters.heads.member_stride;
  int head = int(min(first_head, value_heads - 1));  // a 64-bit index would take one register too many
  for (int member = first_member; member < min(first_member + parameters.members, parameters.heads.members);
       ++member, head += parameters.heads.member_stride) {
    const int64_t row = (int64_t(chunk.batch) * parameters.sequence.tokens + chunk.first) * value_heads + head;
    if (simdgroup == 0) {
      // Computes g_cumsum, and the factors of the rows of v (beta) and of k (beta exp(g_cumsum)), 32 tokens a scan.
      constant GateParameters& gates = parameters.gates;
      float carried = 0.0f;
      UNROLL for (int base = 0; base < C; base += 32) {
        const int token = base + int(lane);
        const bool inside = token < chunk.tokens;
        const uint bits = inside ? gate_bits_at(g, gates, chunk.batch, chunk.first + token, head) : 0u;
        const float gate = inside ? log_decay_of_bits(bits, A_log, dt_bias, gates, head) : 0.0f;
        const float token_beta = inside ? beta_at(beta, gates, chunk.batch, chunk.first + token, head) : 0.0f;
        const float sum = running_sum<(C < 32 ? C : 32)>(carried, clamped_log_decay(gate), lane);
        carried = simd_shuffle(sum, ushort(31));
        if (token < C) {
          chunk_g_cumsum[token] = sum;
          value_scale[token] = token_beta;
          key_scale[token] = token_beta * exp(sum);
        }
        if (inside) g_cumsum[row + token * value_heads] = sum;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Computes A. exp(c_i - c_j) is computed only below the diagonal, because it overflows above.
    UNROLL for (int n = 0; n <= kBlocks; ++n) {
      const BlockPosition block = own_block<C>(simdgroup, n);
      const int i = block.row * 8 + at.row;
      const int j = block.column * 8 + at.column;
      const bool is_there = i < chunk.tokens;
      float2 value = float2(0.0f);
      if (is_there && i > j) value.x = value_scale[i] * products[n].x * exp(chunk_g_cumsum[i] - chunk_g_cumsum[j]);
      if (is_there && i > j + 1)
        value.y = value_scale[i] * products[n].y * exp(chunk_g_cumsum[i] - chunk_g_cumsum[j + 1]);
      store_triangle(triangle, block.row, block.column, at, value);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    invert_diagonal<C>(triangle, thread_index);

    device const T* values = v + offset_of(parameters.v, chunk.batch, chunk.first, head);
    // One loop processes the slices of v, then those of k, so that the addresses of a slice do not stay in registers
    // during another one.
    for (int slice = 0; slice < kValueSlices + kKeySlices; ++slice) {
      const bool is_key = slice >= kValueSlices;
      const int size = is_key ? K : V;
      const int column = (is_key ? slice - kValueSlices : slice) * kColumns;
      solve_slice<C, kSides, kColumns, Width, kThreads>(
          (is_key ? w : u) + row * size + column, value_heads * size, (is_key ? keys : values) + column,
          is_key ? parameters.k.token : parameters.v.token, results, triangle, is_key ? &key_scale[0] : &value_scale[0],
          chunk.tokens, size - column, thread_index, simdgroup, at);
    }
  }
}
