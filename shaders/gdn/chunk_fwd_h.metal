// A threadgroup owns 32 value columns of one head of one sequence and walks its chunks; each of its 4 simdgroups owns
// 8. In registers: S [K, 8] f32 for the whole sequence, v_new [C, 8] of a chunk.
// Layout: k [B, T, H, K] with row strides, w [B, T, HV, K], u and v_new [B, T, HV, V], g_cumsum [B, T, HV] f32, h [B,
// NT, HV, ...] and states [N, HV, ...] with any strides of K and V; in place both states are a pool of P. Intermediate
// is T, or float where T is half: a state may leave half's range.
// v_new = u - w S;  S <- exp(c_last) S + (k exp(c_last - c))^T v_new,  c = g_cumsum
#include "core/checkpoints.h"
#include "core/fragment.h"
#include "core/sequences.h"
#include "core/slots.h"
#include "core/tile.h"
#include "gdn/chunk_fwd_h.h"

// Rows of w and k in threadgroup memory at once: 17 KB at K = 256.
template <typename Intermediate, int C>
METAL_FUNC constexpr int staged_rows() {
  return sizeof(Intermediate) == 2 && C >= 32 ? 32 : 16;
}

template <typename T, int K>
METAL_FUNC void store_state(
    device T* target, StateStrides strides, int columns, LanePosition at, thread const float2* state) {
  UNROLL for (int block = 0; block < (K + 7) / 8; ++block) {
    store_fragment(
        target + block * 8 * strides.key, strides.key, strides.value, K - block * 8, columns, at, state[block]);
  }
}

template <typename T, typename Intermediate, int K, int V, int C, int Width, typename P>
[[kernel]] void chunk_fwd_h(
    device const T* k [[buffer(0)]],
    device const Intermediate* w [[buffer(1)]],
    device const Intermediate* u [[buffer(2)]],
    device const float* g_cumsum [[buffer(3)]],
    device const P* initial_state [[buffer(4)]],
    device const int64_t* cu_seqlens [[buffer(5)]],
    device const int* state_indices [[buffer(6)]],
    device const uchar* has_initial_state [[buffer(7)]],
    device const int* checkpoint_offsets [[buffer(8)]],
    device const int* checkpoint_indices [[buffer(9)]],
    device Intermediate* h [[buffer(10)]],
    device Intermediate* v_new [[buffer(11)]],
    device P* final_state [[buffer(12)]],
    device ErrorLog* errors [[buffer(13)]],
    constant ChunkFwdHParameters& parameters [[buffer(14)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(C == 16 || C == 32 || C == 64, "a chunk has 16, 32 or 64 tokens");
  static_assert(K >= 1 && K <= 256 && V >= 1 && V <= 512, "K is at most 256 and V at most 512");
  constexpr int kDepths = (K + 7) / 8;
  static_assert(sizeof(Intermediate) >= sizeof(T), "an intermediate has at least the size of an input");
  constexpr int kRows = staged_rows<Intermediate, C>();
  constexpr int kColumns = kDepths * 8;
  constexpr int kStageStride = tile_stride<Intermediate>(kColumns);
  constexpr int kKeyStride = tile_stride<T>(kColumns);
  alignas(16) threadgroup Intermediate stage_tile[kRows * kStageStride];  // of w, then of k
  threadgroup T* key_tile = (threadgroup T*)stage_tile;

  const int target = int(group.z);
  const int64_t head = int64_t(group.y);
  const int64_t key_head = key_head_of(int(group.y), parameters.heads);
  const int64_t value_heads = parameters.value_heads;
  const int first_column = int(group.x) * kStateColumns + int(simdgroup) * 8;
  const int columns = V - first_column;  // may be 0 or less for the last simdgroups
  const LanePosition at = lane_position(lane);
  const Sequence sequence = locate_sequence(cu_seqlens, parameters.sequence, target, C, lane);

  const Slot slot = locate_slot(state_indices, has_initial_state, parameters.slots, target, lane);
  const bool is_reporter = group.x == 0 && group.y == 0 && simdgroup == 0 && lane == 0;
  const Checkpoint checkpoint = locate_checkpoint(
      checkpoint_offsets, checkpoint_indices, parameters.checkpoints, state_indices, parameters.slots,
      parameters.sequence.sequences, target, sequence.last - sequence.first, errors, is_reporter, lane);
  if (is_reporter) report_slot(slot, errors);
  if (group.x == 0 && group.y == 0 && group.z == 0 && simdgroup == 0) {
    report_cu_seqlens(cu_seqlens, parameters.sequence, C, errors, lane);
  }

  float2 state[kDepths];
  device const P* initial = initial_state + slot.index * parameters.initial_state.sequence +
                            head * parameters.initial_state.head + first_column * parameters.initial_state.value;
  UNROLL for (int block = 0; block < kDepths; ++block) {
    state[block] = float2(0.0f);
    if (parameters.has_initial_state != 0 && slot.is_present && slot.has_state) {
      state[block] = load_fragment(
          initial + block * 8 * parameters.initial_state.key, parameters.initial_state.key,
          parameters.initial_state.value, K - block * 8, columns, at);
    }
  }

  // Chunks beyond the NT rows of h are left out; report_cu_seqlens() tells the user.
  int64_t chunk_row = sequence.first_chunk;
  const int64_t last_row =
      parameters.sequence.packed != 0 ? parameters.sequence.chunks : chunk_row + parameters.sequence.chunks;
  const int64_t capacity = (last_row - chunk_row) * C;
  const int last_token = sequence.last - sequence.first > capacity ? sequence.first + int(capacity) : sequence.last;
  device Intermediate* chunk_state = h + head * parameters.h.head + first_column * parameters.h.value;
  device P* kept_states =
      final_state + head * parameters.final_state.head + first_column * parameters.final_state.value;
  const int64_t batch_token = int64_t(sequence.batch) * parameters.sequence.tokens;
  device const T* keys = k + sequence.batch * parameters.k.batch + key_head * parameters.k.head;
  for (int first = sequence.first; first < last_token; first += C) {
    const int tokens = min(C, sequence.last - first);
    const int read_tokens = slot.is_present ? tokens : 0;  // without a slot all results are zeros
    const int64_t row = (batch_token + first) * value_heads + head;
    store_state<Intermediate, K>(chunk_state + chunk_row * parameters.h.sequence, parameters.h, columns, at, state);
    ++chunk_row;

    // v_new = u - w S
    float2 v_new_blocks[C / 8];
    UNROLL for (int first_row = 0; first_row < C; first_row += kRows) {
      stage_rows<kRows, kColumns, Width, kStateThreads>(
          stage_tile, w + (row + first_row * value_heads) * K, value_heads * K, read_tokens - first_row, K,
          thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL for (int block = 0; block < kRows / 8; ++block) {
        const int i = first_row + block * 8;
        float2 read = float2(0.0f);
        UNROLL for (int depth = 0; depth < kDepths; ++depth) {
          multiply_add(
              read, load_fragment(stage_tile + block * 8 * kStageStride + depth * 8, kStageStride, at), state[depth]);
        }
        const int64_t corner = (row + i * value_heads) * V + first_column;
        v_new_blocks[i / 8] = load_fragment(u + corner, value_heads * V, 1, read_tokens - i, columns, at) - read;
        store_fragment(v_new + corner, value_heads * V, 1, tokens - i, columns, at, v_new_blocks[i / 8]);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    // S <- exp(c_last) S + (k exp(c_last - c))^T v_new
    const float g_last = read_tokens == 0 ? 0.0f : g_cumsum[row + (tokens - 1) * value_heads];
    UNROLL for (int block = 0; block < C / 8; ++block) {
      const int i = block * 8 + at.row;
      v_new_blocks[block] *= i < read_tokens ? exp(g_last - g_cumsum[row + i * value_heads]) : 0.0f;
    }
    const float decay = exp(g_last);
    UNROLL for (int depth = 0; depth < kDepths; ++depth) state[depth] *= decay;
    UNROLL for (int first_row = 0; first_row < C; first_row += kRows) {
      stage_rows<kRows, kColumns, Width, kStateThreads>(
          key_tile, keys + (first + first_row) * parameters.k.token, parameters.k.token, read_tokens - first_row, K,
          thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL for (int block = 0; block < kRows / 8; ++block) {
        UNROLL for (int depth = 0; depth < kDepths; ++depth) {
          multiply_add(
              state[depth], load_transposed(key_tile + block * 8 * kKeyStride + depth * 8, kKeyStride, at),
              v_new_blocks[first_row / 8 + block]);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (first + C - sequence.first == checkpoint.tokens && slot.is_present) {
      store_state<P, K>(
          kept_states + checkpoint.index * parameters.final_state.sequence, parameters.final_state, columns, at, state);
    }
  }

  if (parameters.has_final_state != 0 && slot.is_present) {
    store_state<P, K>(
        kept_states + slot.index * parameters.final_state.sequence, parameters.final_state, columns, at, state);
  }

  // The last sequence's threadgroups write zeros to surplus rows of h.
  if (parameters.sequence.packed != 0 && target == parameters.sequence.sequences - 1) {
    UNROLL for (int depth = 0; depth < kDepths; ++depth) state[depth] = float2(0.0f);
    for (; chunk_row < last_row; ++chunk_row) {
      store_state<Intermediate, K>(chunk_state + chunk_row * parameters.h.sequence, parameters.h, columns, at, state);
    }
  }
}
