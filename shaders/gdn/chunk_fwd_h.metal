// Computes the states before each chunk, and v_new. A threadgroup owns 32 value columns of one head of one sequence,
// and walks its chunks. Each of its 4 simdgroups owns 8 columns.
// Registers: S [K, 8] f32 for the whole sequence, v_new [C, 8] of a chunk.
// Threadgroup memory: rows of w or k, or keys of S that move from or to device memory; rows of u, then of v_new.
// Layout: k [B, T, H, K] with row strides, w [B, T, HV, K], u and v_new [B, T, HV, V], g_cumsum [B, T, HV] f32, h
// [B, NT, HV, ...] and states [N, HV, ...] with any strides of K and V. In place, both states are a pool of P slots.
// Intermediate is T, or float if T is half, because a state may leave half's range.
//     v_new = u - w S;  S <- exp(c_last) S + (k exp(c_last - c))^T v_new,  c = g_cumsum
// With channel decays, k [B, T, HV, K] is already decayed to the chunk's end, and g_cumsum [B, NT, HV, K] has the log
// decays of a whole chunk:
//     S <- exp(g_cumsum) S + k^T v_new
#include "core/fragment.h"
#include "core/tile.h"
#include "gdn/parameters.h"
#include "gdn/state_blocks.h"
#include "gdn/state_threadgroup.h"

// The number of rows of w and k that threadgroup memory holds at once: 17 KB at K = 256.
template <typename Intermediate, int C>
METAL_FUNC constexpr int staged_rows() {
  return sizeof(Intermediate) == 2 && C >= 32 ? 32 : 16;
}

// A stack of blocks in registers, with the last block on top. It has no loops, because a compiler takes a loop for a
// copy of memory.
template <int Blocks, int At = Blocks - 1>
METAL_FUNC void push_block(thread float2* blocks, float2 block) {
  if constexpr (At > 0) {
    blocks[At] = blocks[At - 1];
    push_block<Blocks, At - 1>(blocks, block);
  } else {
    blocks[0] = block;
  }
}

template <int Blocks, int At = 0>
METAL_FUNC void pop_block(thread float2* blocks) {
  if constexpr (At + 1 < Blocks) {
    blocks[At] = blocks[At + 1];
    pop_block<Blocks, At + 1>(blocks);
  }
}

template <typename T, typename Intermediate, int K, int V, int C, int Width, typename P, bool HasChannelDecays = false>
[[kernel]] void chunk_fwd_h(
    device const T* k [[buffer(0)]],
    device const Intermediate* w [[buffer(1)]],
    device const Intermediate* u [[buffer(2)]],
    device const float* g_cumsum [[buffer(3)]],
    device const P* initial_state [[buffer(4)]],
    device const int* cu_seqlens [[buffer(5)]],
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
  constexpr int kStageFloats = kRows * kStageStride * int(sizeof(Intermediate)) / 4;
  constexpr int kScratchFloats = kStageFloats > 8 * kStateColumns ? kStageFloats : 8 * kStateColumns;
  constexpr int kKeys = staged_keys(kScratchFloats);
  alignas(16) threadgroup float scratch[kScratchFloats];  // w, then k; between chunks, S
  constexpr int kValueStride = tile_stride<Intermediate>(kStateColumns);
  threadgroup Intermediate* stage_tile = (threadgroup Intermediate*)scratch;
  threadgroup T* key_tile = (threadgroup T*)scratch;
  alignas(16) threadgroup Intermediate value_tile[kRows * kValueStride];  // u, then v_new
  threadgroup float weights[C];                                           // exp(c_last - c)

  const StateThreadgroup own = state_threadgroup(
      cu_seqlens, state_indices, has_initial_state, checkpoint_offsets, checkpoint_indices, parameters, group.z, V, C,
      C, errors, group, simdgroup, lane);
  const LanePosition at = lane_position(lane);
  const int64_t value_heads = parameters.value_heads;

  float2 state[kDepths];
  load_first_state<K, kKeys>(state, own, initial_state, final_state, parameters, scratch, thread_index, simdgroup, at);

  // Skips chunks beyond the NT rows of h. report_cu_seqlens() tells the user.
  int64_t chunk_row = own.sequence.first_chunk;
  const int64_t last_row =
      parameters.sequence.boundary_bytes != 0 ? parameters.sequence.chunks : chunk_row + parameters.sequence.chunks;
  const int64_t capacity = (last_row - chunk_row) * C;
  const int last_token =
      own.sequence.last - own.sequence.first > capacity ? own.sequence.first + int(capacity) : own.sequence.last;
  device Intermediate* chunk_state = h + own_columns(own, parameters.h);
  const int checkpoint_at = own.sequence.first + own.checkpoint.tokens;
  device P* kept_states = final_state + own_columns(own, parameters.final_state);
  const int64_t batch_token = int64_t(own.sequence.batch) * parameters.sequence.tokens;
  device const T* keys = k + own.sequence.batch * parameters.k.batch + own.key_head * parameters.k.head;
  for (int first = own.sequence.first; first < last_token; first += C) {
    const int tokens = min(C, own.sequence.last - first);
    const int read_tokens = own.slot.is_present ? tokens : 0;  // without a slot, all results are zeros
    const int64_t row = (batch_token + first) * value_heads + own.head;
    store_state<K, kKeys>(
        state, chunk_state + chunk_row * parameters.h.sequence, parameters.h, own.values, scratch, thread_index,
        simdgroup, at);
    ++chunk_row;

    // Computes v_new = u - w S. The stack holds v_new times exp(c_last - c). Each round takes only one block of 8 rows:
    // if this were unrolled, the addresses and operands of all rounds would be in registers together.
    const bool has_g_last = !HasChannelDecays && read_tokens > 0;
    const float g_last = has_g_last ? g_cumsum[row + (tokens - 1) * value_heads] : 0.0f;
    if (!HasChannelDecays && int(thread_index) < C) {
      const int token = int(thread_index);
      weights[token] = token < read_tokens ? exp(g_last - g_cumsum[row + token * value_heads]) : 0.0f;
    }
    float2 weighted[C / 8];
    UNROLL for (int block = 0; block < C / 8; ++block) weighted[block] = float2(0.0f);
    for (int i = 0; i < tokens; i += 8) {
      if (i % kRows == 0) {  // needs no barrier: a thread stages u where it has just read v_new
        const int64_t corner = row + i * value_heads;
        stage_rows<kRows, kColumns, Width, kStateThreads>(
            stage_tile, w + corner * K, value_heads * K, read_tokens - i, K, thread_index);
        stage_rows<kRows, kStateColumns, Width, kStateThreads>(
            value_tile, u + corner * V + own.first_value, value_heads * V, read_tokens - i, own.values, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      threadgroup const Intermediate* rows = stage_tile + i % kRows * kStageStride;
      float2 read = float2(0.0f);
      UNROLL for (int depth = 0; depth < kDepths; ++depth) {
        multiply_add(read, load_even_fragment(rows + depth * 8, kStageStride, at), state[depth]);
      }
      threadgroup Intermediate* own_values = value_tile + i % kRows * kValueStride + int(simdgroup) * 8;
      const float2 value = load_even_fragment(own_values, kValueStride, at) - read;
      store_even_fragment(own_values, kValueStride, at, value);
      if constexpr (HasChannelDecays) {
        push_block<C / 8>(weighted, value);
      } else {
        push_block<C / 8>(weighted, weights[i + at.row] * value);
      }
      if (i % kRows == kRows - 8 || i + 8 >= tokens) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const int first_row = i / kRows * kRows;
        write_rows<kRows, kStateColumns, Width, kStateThreads>(
            v_new + (row + first_row * value_heads) * V + own.first_value, value_tile, value_heads * V,
            tokens - first_row, own.values, thread_index);
      }
    }

    // Computes S <- exp(c_last) S + (k exp(c_last - c))^T v_new, from the last rows to the first.
    if constexpr (HasChannelDecays) {
      if (read_tokens > 0) decay_channels<K>(state, g_cumsum + ((chunk_row - 1) * value_heads + own.head) * K, at);
    } else {
      const float decay = exp(g_last);
      UNROLL for (int depth = 0; depth < kDepths; ++depth) state[depth] *= decay;
    }
    const int last_block = (tokens - 1) / 8 * 8;
    for (int i = last_block; i >= 0; i -= 8) {
      if (i == last_block || i % kRows == kRows - 8) {
        const int first_row = i / kRows * kRows;
        if (i < last_block) threadgroup_barrier(mem_flags::mem_threadgroup);
        stage_rows<kRows, kColumns, Width, kStateThreads>(
            key_tile, keys + (first + first_row) * parameters.k.token, parameters.k.token, read_tokens - first_row, K,
            thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      threadgroup const T* rows = key_tile + i % kRows * kKeyStride;
      UNROLL for (int depth = 0; depth < kDepths; ++depth) {
        float2 update = float2(0.0f);  // over 8 tokens, rounded once: each term may be small compared with S
        multiply_add(update, load_transposed(rows + depth * 8, kKeyStride, at), weighted[0]);
        state[depth] += update;
      }
      pop_block<C / 8>(weighted);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (first + C == checkpoint_at && own.slot.is_present) {
      store_state<K, kKeys>(
          state, kept_states + own.checkpoint.index * parameters.final_state.sequence, parameters.final_state,
          own.values, scratch, thread_index, simdgroup, at);
    }
  }

  if (parameters.has_final_state != 0 && own.slot.is_present) {
    store_state<K, kKeys>(
        state, kept_states + own.slot.index * parameters.final_state.sequence, parameters.final_state, own.values,
        scratch, thread_index, simdgroup, at);
  }

  // The last sequence's threadgroups write zeros to surplus rows of h.
  if (parameters.sequence.boundary_bytes != 0 && int(group.z) == parameters.sequence.sequences - 1) {
    UNROLL for (int depth = 0; depth < kDepths; ++depth) state[depth] = float2(0.0f);
    for (; chunk_row < last_row; ++chunk_row) {
      store_state<K, kKeys>(
          state, chunk_state + chunk_row * parameters.h.sequence, parameters.h, own.values, scratch, thread_index,
          simdgroup, at);
    }
  }
}
