// A threadgroup owns 32 value columns of one head of one sequence and walks its chunks; each of its 4 simdgroups owns
// 8. In registers: S [K, 8] f32 for the whole sequence; S^T k, S^T q and v_new [C, 8] of a chunk; q, k and v of the
// next chunk, loaded ahead. In threadgroup memory: q, k, v and the two C x C matrices. No intermediate in device
// memory.
// Layout: q, k [B, T, H, K], v [B, T, HV, V] with row strides; g, beta [B, T, HV] of any strides and float dtype, or
// raw; o [B, T, HV, V] with row strides, T or f32; states [N, HV, ...] with any strides of K and V; in place both are a
// pool of P. (I + A) v_new = beta (v - exp(c) S^T k), A_ij = beta_i (k_i . k_j) exp(c_i - c_j) for i > j, by forward
// substitution in blocks of 8 rows, whose inverses are formed by forward substitution too: no w, no Neumann series. o =
// scale (exp(c) S^T q + tril(q k^T exp(c_i - c_j)) v_new);  S <- exp(c_last) S + (k exp(c_last - c))^T v_new; c =
// g_cumsum
#include "core/checkpoints.h"
#include "core/running_sum.h"
#include "core/sequences.h"
#include "core/slots.h"
#include "gdn/fused_chunk.h"

// L <- (I - L)^-1, L strictly lower triangular, 8 rows, by forward substitution: a lane solves a column.
METAL_FUNC void invert_diagonal(threadgroup float* block, int stride, uint lane) {
  const int column = int(lane) % 8;
  float x[8];
  UNROLL for (int i = 0; i < 8; ++i) {
    x[i] = i == column ? 1.0f : 0.0f;
    UNROLL for (int first = 0; first < i; first += 4) {
      const float4 row = *(threadgroup const float4*)(block + i * stride + first);
      UNROLL for (int m = first; m < i && m < first + 4; ++m) x[i] += row[m - first] * x[m];
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (lane < 8) {
    UNROLL for (int i = 0; i < 8; ++i) block[i * stride + column] = x[i];
  }
}

// What the rows of a token are multiplied by. In threadgroup memory: a shuffle whose lane differs within four
// neighbours is four shuffles and three choices on M1 and M2.
struct TokenScalars {
  float gate, beta;            // as passed: raw, or final; then g_cumsum and beta
  float query_norm, key_norm;  // inverse; 1 without normalisation; then 0 of no token, and scale is in the first
};

// Of the simdgroup's tokens, lane r the gate, as passed, of number r.
template <int Rounds>
METAL_FUNC float load_gate(
    device const uchar* g,
    constant FusedChunkParameters& parameters,
    int64_t batch,
    int64_t head,
    int first,
    int count,
    uint lane,
    uint simdgroup) {
  const int own = own_token(lane, simdgroup);
  return int(lane) < Rounds && own < count ? raw_gate_at(g, parameters.gates, batch, first + own, head) : 0.0f;
}

template <int Padded, int Width, typename Vector, int Rounds, int Vectors, typename T>
METAL_FUNC void store_tokens(
    thread const Tokens<T, Vector, Rounds, Vectors>& tokens,
    float gate,
    threadgroup T* query_tile,
    threadgroup T* key_tile,
    threadgroup float* value_tile,
    threadgroup TokenScalars* scalars,
    bool has_norm,
    uint lane,
    uint simdgroup) {
  constexpr int kStride = tile_stride<T>(Padded);
  UNROLL for (int round = 0; round < Rounds; ++round) {
    const int row = round * kSimdgroups + int(simdgroup);
    store_row<Padded, Vectors, Width>(query_tile + row * kStride, tokens.queries[round], lane);
    store_row<Padded, Vectors, Width>(key_tile + row * kStride, tokens.keys[round], lane);
    value_tile[row * kValueStride + int(lane)] = float(tokens.values[round]);
    float query_norm = 1.0f;
    float key_norm = 1.0f;
    if (has_norm) {
      query_norm = inverse_norm<Vectors, Width>(tokens.queries[round]);
      key_norm = inverse_norm<Vectors, Width>(tokens.keys[round]);
    }
    if (lane == 0) {
      scalars[row].query_norm = query_norm;
      scalars[row].key_norm = key_norm;
    }
  }
  if (int(lane) < Rounds) {
    threadgroup TokenScalars& own = scalars[own_token(lane, simdgroup)];
    own.gate = gate;
    own.beta = tokens.beta;
  }
}

// By one simdgroup: lane i has token i, of `count`. Gates are clamped so that differences of g_cumsum keep their
// digits.
template <int C>
METAL_FUNC void finish_scalars(
    threadgroup TokenScalars* scalars,
    HeadGate head_gate,
    constant FusedChunkParameters& parameters,
    int count,
    uint lane) {
  const bool is_there = int(lane) < min(C, count);
  const float gate = is_there ? log_decay_of(scalars[lane].gate, head_gate) : 0.0f;
  const float g_cumsum = running_sum<C>(0.0f, clamped_log_decay(gate), lane);
  if (int(lane) < C) {
    threadgroup TokenScalars& own = scalars[lane];
    own.gate = g_cumsum;
    own.beta = is_there ? beta_of(own.beta, parameters.gates) : 0.0f;
    own.query_norm = is_there ? parameters.scale * own.query_norm : 0.0f;
    own.key_norm = is_there ? own.key_norm : 0.0f;
  }
}

// -A, then tril(q k^T exp(c_i - c_j)): the lower blocks, divided among the simdgroups; of -A's diagonal blocks L is (I
// - L)^-1 written. The key tile follows the query tile.
template <int Padded, int C, typename T>
METAL_FUNC void form_matrices(
    threadgroup float* minus_A,
    threadgroup const T* query_tile,
    threadgroup const TokenScalars* scalars,
    uint lane,
    uint simdgroup,
    LanePosition at) {
  constexpr int kBlocks = C / 8;
  constexpr int kStride = tile_stride<T>(Padded);
  constexpr int kMatrixStride = C + 4;
  threadgroup const T* key_tile = query_tile + C * kStride;
  for (int item = int(simdgroup); item < kBlocks * (kBlocks + 1); item += kSimdgroups) {
    const bool is_A = item % 2 == 0;
    const int block = item / 2;
    const int row = int(block >= 1) + int(block >= 3) + int(block >= 6);
    const int column = block - row * (row + 1) / 2;
    threadgroup const T* left = query_tile + (is_A ? C * kStride : 0) + row * 8 * kStride;
    threadgroup const T* right = key_tile + column * 8 * kStride;
    float2 product = float2(0.0f);
    for (int depth = 0; depth < Padded; depth += 8) {
      multiply_add(product, load_even_fragment(left + depth, kStride, at), load_transposed(right + depth, kStride, at));
    }
    const int i = row * 8 + at.row;
    const int j = column * 8 + at.column;
    const TokenScalars own = scalars[i];
    const TokenScalars others[2] = {scalars[j], scalars[j + 1]};
    const float factor = is_A ? -own.beta * own.key_norm : own.query_norm;
    product *= factor * float2(others[0].key_norm, others[1].key_norm);
    const int below = is_A ? i - 1 : i;  // the last column kept
    product.x = j <= below ? product.x * gate_exp(own.gate - others[0].gate) : 0.0f;
    product.y = j + 1 <= below ? product.y * gate_exp(own.gate - others[1].gate) : 0.0f;
    threadgroup float* target = minus_A + (is_A ? 0 : C * kMatrixStride) + row * 8 * kMatrixStride + column * 8;
    store_even_fragment(target, kMatrixStride, at, product);
    if (is_A && row == column) {
      simdgroup_barrier(mem_flags::mem_threadgroup);
      invert_diagonal(target, kMatrixStride, lane);
    }
  }
}

template <typename T, int K, int C, int Width, typename P>
[[kernel]] void fused_chunk_gated_delta_rule(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]],
    device const uchar* g [[buffer(3)]],
    device const uchar* beta [[buffer(4)]],
    device const uchar* A_log [[buffer(5)]],
    device const uchar* dt_bias [[buffer(6)]],
    device const P* initial_state [[buffer(7)]],
    device const int64_t* cu_seqlens [[buffer(8)]],
    device const int* state_indices [[buffer(9)]],
    device const uchar* has_initial_state [[buffer(10)]],
    device const int* checkpoint_offsets [[buffer(11)]],
    device const int* checkpoint_indices [[buffer(12)]],
    device T* o [[buffer(13)]],
    device P* final_state [[buffer(14)]],
    device ErrorLog* errors [[buffer(15)]],
    constant FusedChunkParameters& parameters [[buffer(16)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(C == 8 || C == 16 || C == 32, "a chunk has 8, 16 or 32 tokens: no more than lanes");
  static_assert(K >= 1 && K <= 256, "K is at most 256");
  typedef typename VectorOf<T, Width>::type Vector;
  constexpr int kDepths = (K + 7) / 8;
  constexpr int kPadded = kDepths * 8;
  constexpr int kBlocks = C / 8;
  constexpr int kRounds = C / kSimdgroups;
  constexpr int kVectors = (kPadded / Width + 31) / 32;
  constexpr int kStride = tile_stride<T>(kPadded);
  constexpr int kMatrixStride = C + 4;
  constexpr int kTileFloats = 2 * C * kStride * int(sizeof(T)) / 4;
  constexpr int kScratchFloats = kTileFloats > 8 * kStateColumns ? kTileFloats : 8 * kStateColumns;
  constexpr int kKeys = staged_keys(kScratchFloats);
  alignas(16) threadgroup float scratch[kScratchFloats];  // q and k of a chunk; before and after, S
  threadgroup T* query_tile = (threadgroup T*)scratch;
  threadgroup T* key_tile = query_tile + C * kStride;
  alignas(16) threadgroup float value_tile[C * kValueStride];  // v, then o
  alignas(16) threadgroup float minus_A[2 * C * kMatrixStride];
  threadgroup float* scores = minus_A + C * kMatrixStride;
  alignas(16) threadgroup TokenScalars scalars[C];

  const int target = int(group.z);
  const int64_t head = int64_t(group.y);
  const int64_t key_head = key_head_of(int(group.y), parameters.heads);
  const int first_value = int(group.x) * kStateColumns;
  const int values = min(kStateColumns, parameters.value_size - first_value);
  const LanePosition at = lane_position(lane);
  const Sequence sequence = locate_sequence(cu_seqlens, parameters.sequence, target, 1, lane);
  const Slot slot = locate_slot(state_indices, has_initial_state, parameters.slots, target, lane);
  const bool is_reporter = group.x == 0 && group.y == 0 && simdgroup == 0 && lane == 0;
  const Checkpoint checkpoint = locate_checkpoint(
      checkpoint_offsets, checkpoint_indices, parameters.checkpoints, state_indices, parameters.slots,
      parameters.sequence.sequences, target, sequence.last - sequence.first, errors, is_reporter, lane);
  if (is_reporter) report_slot(slot, errors);
  if (group.x == 0 && group.y == 0 && group.z == 0 && simdgroup == 0) {
    report_cu_seqlens(cu_seqlens, parameters.sequence, parameters.counted_chunk_size, errors, lane);
  }

  float2 state[kDepths];
  UNROLL for (int depth = 0; depth < kDepths; ++depth) state[depth] = float2(0.0f);
  if (parameters.has_initial_state != 0 && slot.is_present && slot.has_state) {
    load_state<K, kKeys>(
        state,
        initial_state + slot.index * parameters.initial_state.sequence + head * parameters.initial_state.head +
            first_value * parameters.initial_state.value,
        parameters.initial_state, values, scratch, thread_index, simdgroup, at);
  }

  Sources<T> from;
  from.q = q + sequence.batch * parameters.q.batch + key_head * parameters.q.head;
  from.k = k + sequence.batch * parameters.k.batch + key_head * parameters.k.head;
  from.v = v + sequence.batch * parameters.v.batch + head * parameters.v.head + first_value;
  from.beta = beta;
  from.batch = sequence.batch;
  from.head = head;
  from.values = values;
  const HeadGate head_gate = head_gate_of(A_log, dt_bias, parameters.gates, head);
  const int last_read = slot.is_present ? sequence.last : sequence.first;  // without a slot all results are zeros
  Tokens<T, Vector, kRounds, kVectors> next;
  load_tokens<K, Width>(next, from, parameters, sequence.first, last_read - sequence.first, lane, simdgroup);
  float next_gate = load_gate<kRounds>(
      g, parameters, sequence.batch, head, sequence.first, last_read - sequence.first, lane, simdgroup);

  const int checkpoint_at = sequence.first + checkpoint.tokens;
  device P* kept_states = final_state + head * parameters.final_state.head + first_value * parameters.final_state.value;
  const int64_t first_output = sequence.batch * parameters.o.batch + head * parameters.o.head + first_value;
  for (int first = sequence.first; first < sequence.last; first += C) {
    store_tokens<kPadded, Width>(
        next, next_gate, query_tile, key_tile, value_tile, scalars, parameters.has_norm != 0, lane, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (simdgroup == 0) finish_scalars<C>(scalars, head_gate, parameters, last_read - first, lane);
    // S^T k and S^T q
    float2 key_read[kBlocks];
    float2 query_read[kBlocks];
    UNROLL for (int block = 0; block < kBlocks; ++block) key_read[block] = query_read[block] = float2(0.0f);
    UNROLL for (int depth = 0; depth < kDepths; ++depth) {
      UNROLL for (int block = 0; block < kBlocks; ++block) {
        const int corner = block * 8 * kStride + depth * 8;
        multiply_add(key_read[block], load_even_fragment(key_tile + corner, kStride, at), state[depth]);
        multiply_add(query_read[block], load_even_fragment(query_tile + corner, kStride, at), state[depth]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    form_matrices<kPadded, C>(minus_A, query_tile, scalars, lane, simdgroup, at);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // v_new by block substitution, and o; then exp(c_last - c) v_new, times what k is normalised by
    const float g_last = scalars[C - 1].gate;
    float2 v_new[kBlocks];
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      const int corner = block * 8 * kMatrixStride;
      threadgroup float* own_values = value_tile + block * 8 * kValueStride + int(simdgroup) * 8;
      const TokenScalars own = scalars[block * 8 + at.row];
      const float decay = gate_exp(own.gate);
      const float2 seen = decay * own.key_norm * key_read[block];
      float2 wanted = own.beta * (load_even_fragment(own_values, kValueStride, at) - seen);
      float2 output = decay * own.query_norm * query_read[block];
      UNROLL for (int above = 0; above < block; ++above) {
        multiply_add(wanted, load_even_fragment(minus_A + corner + above * 8, kMatrixStride, at), v_new[above]);
        multiply_add(output, load_even_fragment(scores + corner + above * 8, kMatrixStride, at), v_new[above]);
      }
      v_new[block] = float2(0.0f);
      multiply_add(v_new[block], load_even_fragment(minus_A + corner + block * 8, kMatrixStride, at), wanted);
      multiply_add(output, load_even_fragment(scores + corner + block * 8, kMatrixStride, at), v_new[block]);
      store_even_fragment(own_values, kValueStride, at, output);
    }
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      const TokenScalars own = scalars[block * 8 + at.row];
      v_new[block] *= own.key_norm * gate_exp(g_last - own.gate);
    }

    // S <- exp(c_last) S + (k exp(c_last - c))^T v_new
    const Decay kept = decay_from_log(g_last);
    UNROLL for (int depth = 0; depth < kDepths; ++depth) {
      state[depth] = kept.weak ? state[depth] + kept.factor * state[depth] : kept.factor * state[depth];
    }
    // Only now, so that the next chunk is in registers beside S and v_new alone.
    load_tokens<K, Width>(next, from, parameters, first + C, last_read - first - C, lane, simdgroup);
    next_gate =
        load_gate<kRounds>(g, parameters, sequence.batch, head, first + C, last_read - first - C, lane, simdgroup);
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      UNROLL for (int depth = 0; depth < kDepths; ++depth) {
        const int corner = block * 8 * kStride + depth * 8;
        multiply_add(state[depth], load_transposed(key_tile + corner, kStride, at), v_new[block]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    write_outputs<C>(o, value_tile, first_output, parameters, first, sequence.last, values, lane, simdgroup);
    if (first + C == checkpoint_at && slot.is_present) {
      store_state<K, kKeys>(
          state, kept_states + checkpoint.index * parameters.final_state.sequence, parameters.final_state, values,
          scratch, thread_index, simdgroup, at);
    }
  }

  if (parameters.has_final_state != 0 && slot.is_present) {
    store_state<K, kKeys>(
        state, kept_states + slot.index * parameters.final_state.sequence, parameters.final_state, values, scratch,
        thread_index, simdgroup, at);
  }
}
