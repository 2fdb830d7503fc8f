// Computes the gated delta rule over a whole sequence, chunk by chunk, in one kernel. Device memory holds no
// intermediate.
// A threadgroup owns 32 value columns of one head of one sequence. Each of its 4 simdgroups owns 8 of them.
// Registers: S [K, 8] f32 for the whole sequence; S^T k, S^T q and v_new [C, 8] of a chunk; q, k and v of the next
// chunk, which are loaded ahead.
// Threadgroup memory: q, k, v and the two C x C matrices. If there is room, it also holds k of the next chunk. A chunk
// then has two barriers, one for the staged tiles and one for the matrices.
// Layout: q and k [B, T, H, K] and v [B, T, HV, V] have row strides. g and beta [B, T, HV] have any strides and float
// dtype, and may be raw. o [B, T, HV, V] has row strides, and is T or f32. States [N, HV, ...] have any strides of K
// and V. In place, both states are a pool of P slots.
// With c = g_cumsum:
//     A_ij = beta_i (k_i . k_j) exp(c_i - c_j)  for i > j
//     (I + A) v_new = beta (v - exp(c) S^T k)
//     o = scale (exp(c) S^T q + tril(q k^T exp(c_i - c_j)) v_new)
//     S <- exp(c_last) S + (k exp(c_last - c))^T v_new
// Forward substitution solves for v_new in blocks of 8 rows, and computes the inverses of the blocks. The kernel needs
// neither w nor a Neumann series.
#include "gdn/fused_chunk.h"

// Computes L <- (I - L)^-1 for a strictly lower triangular L of 8 rows, by forward substitution. Each of 8 lanes solves
// one column.
METAL_FUNC void invert_diagonal(threadgroup float* block, int stride, uint lane) {
  const int column = int(lane);
  float x[8];
  UNROLL for (int i = 0; i < 8; ++i) x[i] = i == column ? 1.0f : 0.0f;
  if (lane < 8) {
    UNROLL for (int i = 1; i < 8; ++i) {
      UNROLL for (int first = 0; first < i; first += 4) {
        const float4 row = *(threadgroup const float4*)(block + i * stride + first);
        UNROLL for (int m = first; m < i && m < first + 4; ++m) x[i] += row[m - first] * x[m];
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (lane < 8) {
    UNROLL for (int i = 0; i < 8; ++i) block[i * stride + column] = x[i];
  }
}

// The factors of a token's rows. They are in threadgroup memory: on M1 and M2, a shuffle whose source lane differs
// within four neighbours costs four shuffles and three selections.
struct TokenScalars {
  float g_cumsum, beta;
  float query_norm, key_norm;  // 1 / ||row||, or 1 without norm, or 0 for a missing token; query_norm includes scale
};

template <int Padded, int Width, typename Vector, int Rounds, int Vectors, typename T>
METAL_FUNC void store_tokens(
    thread const Tokens<T, Vector, Rounds, Vectors>& tokens,
    threadgroup T* query_tile,
    threadgroup T* key_tile,
    threadgroup TokenScalars* scalars,
    constant FusedChunkParameters& parameters,
    int count,
    uint lane,
    uint simdgroup) {
  constexpr int kStride = tile_stride<T>(Padded);
  float query_norm = 1.0f;  // lane r holds the norm of the simdgroup's token r
  float key_norm = 1.0f;
  UNROLL for (int round = 0; round < Rounds; ++round) {
    const int row = round * kSimdgroups + int(simdgroup);
    store_row<Padded, Vectors, Width>(query_tile + row * kStride, tokens.queries[round], lane);
    store_row<Padded, Vectors, Width>(key_tile + row * kStride, tokens.keys[round], lane);
    if (parameters.has_norm != 0) {
      const float norms[2] = {
          inverse_norm<Vectors, Width>(tokens.queries[round]), inverse_norm<Vectors, Width>(tokens.keys[round])};
      query_norm = int(lane) == round ? norms[0] : query_norm;
      key_norm = int(lane) == round ? norms[1] : key_norm;
    }
  }
  if (int(lane) < Rounds) {
    const int row = int(lane) * kSimdgroups + int(simdgroup);
    scalars[row].query_norm = row < count ? parameters.scale * query_norm : 0.0f;
    scalars[row].key_norm = row < count ? key_norm : 0.0f;
  }
}

// Called by simdgroup 0 only; lane i handles token i of `count`. Gates are clamped so that differences of g_cumsum keep
// their digits.
template <int C>
METAL_FUNC void store_gates(
    threadgroup TokenScalars* scalars,
    uint gate_bits,
    uint beta_bits,
    HeadGate head_gate,
    constant FusedChunkParameters& parameters,
    int count,
    uint lane) {
  const bool is_there = int(lane) < min(C, count);
  const float gate = is_there ? log_decay_of(float_of_bits(gate_bits, parameters.gates.g_type), head_gate) : 0.0f;
  const float g_cumsum = running_sum<C>(0.0f, clamped_log_decay(gate), lane);
  if (int(lane) < C) {
    scalars[lane].g_cumsum = g_cumsum;
    scalars[lane].beta = is_there ? beta_of_bits(beta_bits, parameters.gates) : 0.0f;
  }
}

// Selects between two values, not between two addresses, because registers have no addresses.
METAL_FUNC float2 choice(float2 a, float2 b, bool is_a) { return float2(is_a ? a.x : b.x, is_a ? a.y : b.y); }

// Computes k S and q S. With the same loads it also computes a block column of k k^T, or of q k^T if `is_q`, from the
// diagonal down. With 4 blocks it computes a column of the other product too, as far from the last column as the first
// one is from column 0. The pointers already include the lane's position. The compiler therefore knows all other
// offsets, and they take no registers.
template <int Padded, int C, typename T>
METAL_FUNC void multiply_tiles(
    thread float2* key_read,
    thread float2* query_read,
    thread float2* products,
    threadgroup const T* query_tile,
    threadgroup const T* key_tile,
    thread const float2* state,
    bool is_q,
    int column,
    LanePosition at) {
  constexpr int kBlocks = C / 8;
  constexpr int kStride = tile_stride<T>(Padded);
  const int own = at.row * kStride + at.column;
  const int own_transposed = at.column * kStride + at.row;
  threadgroup const T* own_keys = key_tile + own;
  threadgroup const T* own_queries = query_tile + own;
  threadgroup const T* own_right = key_tile + (column * 8 * kStride + own_transposed);
  UNROLL for (int depth = 0; depth < Padded / 8; ++depth) {
    float2 keys[kBlocks];
    float2 queries[kBlocks];
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      const int corner = block * 8 * kStride + depth * 8;
      keys[block] = pair_at(own_keys + corner);
      multiply_add(key_read[block], keys[block], state[depth]);
      queries[block] = pair_at(own_queries + corner);
      multiply_add(query_read[block], queries[block], state[depth]);
    }
    if (kBlocks > 1 || column == 0) {
      const float2 right = column_pair_at(own_right + depth * 8, kStride);
      UNROLL for (int row = 0; row < kBlocks; ++row) {
        if (row >= column) multiply_add(products[row], choice(queries[row], keys[row], is_q), right);
      }
    }
    if constexpr (kBlocks == 4) {
      const float2 other = load_transposed(key_tile + (kBlocks - 1 - column) * 8 * kStride + depth * 8, kStride, at);
      UNROLL for (int row = 0; row < kBlocks; ++row) {
        if (row + column < kBlocks - 1) continue;
        multiply_add(products[kBlocks + row], choice(keys[row], queries[row], is_q), other);
      }
    }
  }
}

// Stores a block column, from the diagonal down, of -A or of tril(q k^T exp(c_i - c_j)), which follows A in memory. For
// a diagonal block L of -A it stores (I - L)^-1.
template <int C>
METAL_FUNC void store_matrix(
    threadgroup float* minus_A,
    thread const float2* products,
    threadgroup const TokenScalars* scalars,
    bool is_q,
    int block_column,
    uint lane,
    LanePosition at) {
  constexpr int kMatrixStride = C + 4;
  const bool is_A = !is_q;
  const int j = block_column * 8 + at.column;
  UNROLL for (int row = 0; row < C / 8; ++row) {
    if (row >= block_column) {
      const int i = row * 8 + at.row;
      const TokenScalars own = scalars[i];
      const TokenScalars others[2] = {scalars[j], scalars[j + 1]};
      const float factor = is_A ? -own.beta * own.key_norm : own.query_norm;
      float2 product = products[row] * (factor * float2(others[0].key_norm, others[1].key_norm));
      const int below = is_A ? i - 1 : i;  // last column to keep
      product.x = j <= below ? product.x * gate_exp(own.g_cumsum - others[0].g_cumsum) : 0.0f;
      product.y = j + 1 <= below ? product.y * gate_exp(own.g_cumsum - others[1].g_cumsum) : 0.0f;
      threadgroup float* target = minus_A + (is_A ? 0 : C * kMatrixStride) + row * 8 * kMatrixStride + block_column * 8;
      store_even_fragment(target, kMatrixStride, at, product);
      if (is_A && row == block_column) {
        simdgroup_barrier(mem_flags::mem_threadgroup);
        invert_diagonal(target, kMatrixStride, lane);
      }
    }
  }
}

// With a second tile of k, the next chunk is stored without a barrier while this chunk's k is still read. The registers
// allow three threadgroups per core. If three would no longer fit in the 60 KB of an M1's core, there is only one tile.
METAL_FUNC constexpr int key_tiles(int tile_bytes, int rest_bytes) {
  return 3 * tile_bytes + rest_bytes <= 20 * 1024 ? 2 : 1;
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
    device const int* cu_seqlens [[buffer(8)]],
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
  constexpr int kStrips = (2 * kBlocks + kSimdgroups - 1) / kSimdgroups;  // block columns per simdgroup
  constexpr int kRounds = C / kSimdgroups;
  constexpr int kVectors = (kPadded / Width + 31) / 32;
  constexpr int kStride = tile_stride<T>(kPadded);
  constexpr int kMatrixStride = C + 4;
  constexpr int kRestFloats = C * kValueStride + 2 * C * kMatrixStride + 8 * C;
  constexpr int kKeyTiles = key_tiles(C * kStride * int(sizeof(T)), kRestFloats * 4);
  constexpr int kTileFloats = (1 + kKeyTiles) * C * kStride * int(sizeof(T)) / 4;
  constexpr int kScratchFloats = kTileFloats > 8 * kStateColumns ? kTileFloats : 8 * kStateColumns;
  constexpr int kKeys = staged_keys(kScratchFloats);
  alignas(16) threadgroup float scratch[kScratchFloats];  // q and k of a chunk; S before the first and after the last
  threadgroup T* query_tile = (threadgroup T*)scratch;
  threadgroup T* all_keys = query_tile + C * kStride;
  alignas(16) threadgroup float value_tile[C * kValueStride];  // v, then o
  alignas(16) threadgroup float minus_A[2 * C * kMatrixStride];
  threadgroup float* scores = minus_A + C * kMatrixStride;
  alignas(16) threadgroup TokenScalars all_scalars[kKeyTiles * C];

  const StateThreadgroup own = state_threadgroup(
      cu_seqlens, state_indices, has_initial_state, checkpoint_offsets, checkpoint_indices, parameters, group.z,
      parameters.value_size, 1, parameters.counted_chunk_size, errors, group, simdgroup, lane);
  const LanePosition at = lane_position(lane);

  float2 state[kDepths];
  load_first_state<K, kKeys>(state, own, initial_state, final_state, parameters, scratch, thread_index, simdgroup, at);

  const Sources<T> from = sources_of(q, k, v, g, beta, parameters, own);
  const HeadGate head_gate = head_gate_of(A_log, dt_bias, parameters.gates, own.head);
  const int last_read =
      own.slot.is_present ? own.sequence.last : own.sequence.first;  // without a slot, all results are zeros
  Tokens<T, Vector, kRounds, kVectors> next;
  load_tokens<K, Width>(next, from, parameters, own.sequence.first, last_read - own.sequence.first, lane, simdgroup);

  const int checkpoint_at = own.sequence.first + own.checkpoint.tokens;
  device P* kept_states = final_state + own_columns(own, parameters.final_state);
  const int64_t first_output = own.sequence.batch * parameters.o.batch + own.head * parameters.o.head + own.first_value;
  int first = own.sequence.first;
  for (int tile = 0; first < own.sequence.last; first += C, tile = kKeyTiles - 1 - tile) {
    threadgroup T* key_tile = all_keys + tile * C * kStride;
    threadgroup TokenScalars* scalars = all_scalars + tile * C;
    store_tokens<kPadded, Width>(next, query_tile, key_tile, scalars, parameters, last_read - first, lane, simdgroup);
    if (simdgroup == 0) {
      store_gates<C>(scalars, next.gate, next.beta, head_gate, parameters, last_read - first, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // All of the last chunk's o is complete only here. No barrier separates the writes of o and v, because the same
    // lane writes both.
    if (first > own.sequence.first) {
      write_outputs<C>(
          o, value_tile, first_output, parameters, first - C, own.sequence.last, own.values, lane, simdgroup);
    }
    UNROLL for (int round = 0; round < kRounds; ++round) {
      value_tile[(round * kSimdgroups + int(simdgroup)) * kValueStride + int(lane)] = float(next.values[round]);
    }
    float2 key_read[kBlocks];
    float2 query_read[kBlocks];
    float2 products[kStrips * kBlocks];
    UNROLL for (int block = 0; block < kBlocks; ++block) key_read[block] = query_read[block] = float2(0.0f);
    UNROLL for (int n = 0; n < kStrips * kBlocks; ++n) products[n] = float2(0.0f);
    const bool is_q = simdgroup % 2 == 1;
    const int column = int(simdgroup) / 2;
    multiply_tiles<kPadded, C>(key_read, query_read, products, query_tile, key_tile, state, is_q, column, at);
    store_matrix<C>(minus_A, products, scalars, is_q, column, lane, at);
    if constexpr (kStrips == 2) {
      store_matrix<C>(minus_A, products + kBlocks, scalars, !is_q, kBlocks - 1 - column, lane, at);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Computes v_new by block substitution, and o. Then computes exp(c_last - c) v_new times the factor that normalises
    // k.
    const float g_last = scalars[C - 1].g_cumsum;
    float2 v_new[kBlocks];
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      const int corner = block * 8 * kMatrixStride;
      threadgroup float* own_values = value_tile + block * 8 * kValueStride + int(simdgroup) * 8;
      const TokenScalars own = scalars[block * 8 + at.row];
      const float decay = gate_exp(own.g_cumsum);
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
      v_new[block] *= own.key_norm * gate_exp(g_last - own.g_cumsum);
    }

    // Computes S <- exp(c_last) S + (k exp(c_last - c))^T v_new.
    const Decay kept = decay_from_log(g_last);
    UNROLL for (int depth = 0; depth < kDepths; ++depth) {
      state[depth] = kept.weak ? state[depth] + kept.factor * state[depth] : kept.factor * state[depth];
    }
    // Loads the next chunk this late, so that it shares the registers only with S and v_new.
    load_tokens<K, Width>(next, from, parameters, first + C, last_read - first - C, lane, simdgroup);
    threadgroup const T* own_keys = key_tile + (at.column * kStride + at.row);
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      UNROLL for (int depth = 0; depth < kDepths; ++depth) {
        const int corner = block * 8 * kStride + depth * 8;
        multiply_add(state[depth], column_pair_at(own_keys + corner, kStride), v_new[block]);
      }
    }
    if constexpr (kKeyTiles == 1) threadgroup_barrier(mem_flags::mem_threadgroup);

    if (first + C == checkpoint_at && own.slot.is_present) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      store_state<K, kKeys>(
          state, kept_states + own.checkpoint.index * parameters.final_state.sequence, parameters.final_state,
          own.values, scratch, thread_index, simdgroup, at);
    }
  }

  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (first > own.sequence.first) {
    write_outputs<C>(
        o, value_tile, first_output, parameters, first - C, own.sequence.last, own.values, lane, simdgroup);
  }
  if (parameters.has_final_state != 0 && own.slot.is_present) {
    store_state<K, kKeys>(
        state, kept_states + own.slot.index * parameters.final_state.sequence, parameters.final_state, own.values,
        scratch, thread_index, simdgroup, at);
  }
}
