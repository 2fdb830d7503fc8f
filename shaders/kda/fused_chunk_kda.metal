// Computes Kimi Delta Attention over a whole sequence in one kernel. Each key channel has its own decay. Device memory
// holds no intermediate. A threadgroup owns 32 value columns of one head of one sequence. It walks the sequence's
// chunks of C tokens, 8 tokens at a time. Each of its 4 simdgroups owns 8 columns. Registers: S [K, 8] f32 for the
// whole sequence; q, k and decays of the next chunk, which are loaded ahead. Threadgroup memory: q, k and decays of a
// chunk, f32.
// Layout: q and k [B, T, H, K] and v [B, T, HV, V] have row strides. g [B, T, HV, K] has row strides, and beta
// [B, T, HV] any strides; both have any float dtype, and may be raw. o [B, T, HV, V] has row strides, and is T or f32.
// States [N, HV, ...] have any strides of K and V. In place, both states are a pool of P slots.
// For 8 tokens, let e = exp(g), and let D(j, i) be the product of e after token j up to token i, a vector over
// channels. Then
//     A_ij = beta_i sum_c k_i D(j, i) k_j  for i > j
//     (I + A) v_new = beta (v - (k D(0, i))^T S), by forward substitution
//     o = scale ((q D(0, i))^T S + sum over j <= i of (q_i . D(j, i) k_j) v_new_j)
//     S <- D(0, 8) S + (k D(j, 8))^T v_new
// Each D is a product of factors of at most 1, so nothing overflows, whatever the decays are. e is computed once per
// token and channel.
#include "gdn/fused_chunk.h"
#include "kda/channel_gates.h"
#include "kda/parameters.h"

GDN_CONSTANT int kMatrixStride = 12;                 // for an 8 x 8 matrix
GDN_CONSTANT int kMatrixFloats = 8 * kMatrixStride;  // per matrix

// Computes x <- (I - L)^-1 x for 8 rows. L is strictly lower triangular. Threadgroup memory holds it with its zeros.
METAL_FUNC void substitute(threadgroup const float* lower, thread float2& x, uint lane, LanePosition at) {
  threadgroup const float4* row = (threadgroup const float4*)(lower + at.row * kMatrixStride);
  const float4 factors[2] = {row[0], row[1]};
  UNROLL for (int i = 0; i < 7; ++i) {
    // The lane that holds x[i][column]. This is the inverse of lane_position().
    const ushort source_lane = ushort((lane & 0x09) | ((i >> 2) << 4) | ((i & 3) << 1));
    x += factors[i / 4][i % 4] * float2(simd_shuffle(x.x, source_lane), simd_shuffle(x.y, source_lane));
  }
}

template <int Padded, int Vectors, int Width, typename Vector>
METAL_FUNC void store_scaled(threadgroup float* target, thread const Vector* vectors, float factor, uint lane) {
  typedef typename VectorOf<float, Width>::type Floats;
  UNROLL for (int n = 0; n < Vectors; ++n) {
    const int column = (n * 32 + int(lane)) * Width;
    if (column < Padded) *(threadgroup Floats*)(target + column) = Floats(vectors[n]) * factor;
  }
}

// Normalises q and k, and multiplies q by the scale.
template <int Padded, int Width, typename T, typename Vector, int Rounds, int Vectors>
METAL_FUNC void store_tokens(
    thread const Tokens<T, Vector, Rounds, Vectors>& tokens,
    threadgroup float* query_tile,
    threadgroup float* key_tile,
    threadgroup float* value_tile,
    threadgroup float* betas,
    constant FusedChunkParameters& parameters,
    int count,
    uint lane,
    uint simdgroup) {
  constexpr int kStride = tile_stride<float>(Padded);
  UNROLL for (int round = 0; round < Rounds; ++round) {
    const int row = round * kSimdgroups + int(simdgroup);
    float query_norm = 1.0f;
    float key_norm = 1.0f;
    if (parameters.has_norm != 0) {
      query_norm = inverse_norm<Vectors, Width>(tokens.queries[round]);
      key_norm = inverse_norm<Vectors, Width>(tokens.keys[round]);
    }
    store_scaled<Padded, Vectors, Width>(
        query_tile + row * kStride, tokens.queries[round], parameters.scale * query_norm, lane);
    store_scaled<Padded, Vectors, Width>(key_tile + row * kStride, tokens.keys[round], key_norm, lane);
    value_tile[row * kValueStride + int(lane)] = float(tokens.values[round]);
  }
  if (simdgroup == 0 && int(lane) < Rounds * kSimdgroups) {
    betas[lane] = int(lane) < count ? beta_of_bits(tokens.beta, parameters.gates) : 0.0f;
  }
}

// Computes e of each token, and D(0, 8) as two factors: S <- x S + y S. The factor x is 1 for a weak decay and 0 for a
// strong one (struct Decay).
template <int Padded, int Blocks, int Items>
METAL_FUNC void store_decays(
    threadgroup float* decay_tile,
    threadgroup float2* kept,
    thread const float* raw_gates,
    thread const ChannelGate* channel_gates,
    constant ChannelGateParameters& parameters,
    int count,
    uint thread_index) {
  constexpr int kStride = tile_stride<float>(Padded);
  UNROLL for (int n = 0; n < Items; ++n) {
    const ChannelItem at = channel_item<Blocks, Padded>(n * kStateThreads + thread_index);
    if (at.is_there) {
      const float sum = store_block_decays(
          decay_tile + at.block * 8 * kStride + at.channel, kStride, raw_gates + n * 8, channel_gates[n], parameters,
          count - at.block * 8);
      const Decay decay = decay_from_log(sum);
      kept[at.block * Padded + at.channel] = float2(decay.weak ? 1.0f : 0.0f, decay.factor);
    }
  }
}

// Loads raw gates from element elements[n] of g on. elements[n] then points to the next chunk. Only the first `count`
// tokens exist.
template <int Padded, int Blocks, int Items>
METAL_FUNC void load_gates(
    thread float* gates,
    thread int64_t* elements,
    device const uchar* g,
    constant ChannelGateParameters& parameters,
    int channels,
    int count,
    uint thread_index) {
  int rows[Items];
  UNROLL for (int n = 0; n < Items; ++n) {
    const ChannelItem at = channel_item<Blocks, Padded>(n * kStateThreads + thread_index);
    rows[n] = at.is_there && at.channel < channels ? count - at.block * 8 : 0;
  }
  load_channel_gates<Items>(gates, g, parameters, elements, rows);
  UNROLL for (int n = 0; n < Items; ++n) elements[n] += Blocks * 8 * parameters.g.token;
}

template <int Width, typename Floats>
METAL_FUNC float dot_of(Floats a, Floats b) {
  if constexpr (Width == 1) {
    return a * b;
  } else {
    return dot(a, b);
  }
}

// The number of channels that a lane reads at once.
METAL_FUNC constexpr int channel_width(int padded) { return padded > 64 ? 4 : padded > 32 ? 2 : 1; }

// Computes -A and the scores of 8 tokens. Leaves their upper triangles unchanged. The tiles of q, k and e are `tile`
// floats apart. A lane walks down a column in its own channels, and multiplies k_j by the decay of each further token.
// Each round takes only one row: if this were unrolled, the addresses and sums of all rows would be in registers
// together.
template <int Padded, typename Floats = typename VectorOf<float, channel_width(Padded)>::type>
METAL_FUNC void form_matrices(
    threadgroup float* minus_A,
    threadgroup float* scores,
    threadgroup const float* queries,
    int tile,
    threadgroup const float* betas,
    uint lane,
    uint simdgroup) {
  constexpr int kStride = tile_stride<float>(Padded);
  constexpr int kWidth = channel_width(Padded);
  constexpr int kGroups = (Padded + 32 * kWidth - 1) / (32 * kWidth);
  UNROLL for (int end = 0; end < 2; ++end) {
    const int column = end == 0 ? int(simdgroup) : 7 - int(simdgroup);  // each simdgroup computes 9 pairs of tokens
    Floats decayed[kGroups];
    UNROLL for (int n = 0; n < kGroups; ++n) decayed[n] = Floats(0.0f);
    for (int row = column; row < 8; ++row) {
      float key_product = 0.0f;
      float query_product = 0.0f;
      UNROLL for (int n = 0; n < kGroups; ++n) {
        const int channel = (n * 32 + int(lane)) * kWidth;
        if (channel < Padded) {
          threadgroup const float* query = queries + row * kStride + channel;
          const Floats key = *(threadgroup const Floats*)(query + tile);
          decayed[n] *= *(threadgroup const Floats*)(query + 2 * tile);
          if (row == column) decayed[n] = key;
          key_product += dot_of<kWidth>(decayed[n], key);
          query_product += dot_of<kWidth>(decayed[n], *(threadgroup const Floats*)query);
        }
      }
      key_product = simd_sum(key_product);
      query_product = simd_sum(query_product);
      if (lane == 0) {
        minus_A[row * kMatrixStride + column] = row > column ? -betas[row] * key_product : 0.0f;
        scores[row * kMatrixStride + column] = query_product;
      }
    }
  }
}

template <typename T, int K, int C, int Width, typename P>
[[kernel]] void fused_chunk_kda(
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
    constant FusedChunkKdaParameters& all [[buffer(16)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(C == 8 || C == 16 || C == 32, "a chunk has 8, 16 or 32 tokens");
  static_assert(K >= 1 && K <= 256, "K is at most 256");
  typedef typename VectorOf<T, Width>::type Vector;
  constexpr int kDepths = (K + 7) / 8;
  constexpr int kPadded = kDepths * 8;
  constexpr int kBlocks = C / 8;
  constexpr int kRounds = C / kSimdgroups;
  constexpr int kVectors = (kPadded / Width + 31) / 32;
  constexpr int kItems = (kBlocks * kPadded + kStateThreads - 1) / kStateThreads;
  constexpr int kStride = tile_stride<float>(kPadded);
  constexpr int kTile = C * kStride;
  constexpr int kKeys = staged_keys(3 * kTile);
  static_assert(3 * kTile >= 8 * kStateColumns, "the tiles hold 8 keys of S");
  alignas(16) threadgroup float query_tile[3 * kTile];  // q, k, decays of a chunk; S before the first, after the last
  threadgroup float* key_tile = query_tile + kTile;
  threadgroup float* decay_tile = key_tile + kTile;
  alignas(16) threadgroup float value_tile[C * kValueStride];  // v, then o
  alignas(16) threadgroup float minus_A[2 * kBlocks * kMatrixFloats];
  threadgroup float* scores = minus_A + kBlocks * kMatrixFloats;
  threadgroup float2 kept[kBlocks * kPadded];
  threadgroup float betas[C];

  constant FusedChunkParameters& parameters = all.rule;
  const StateThreadgroup own = state_threadgroup(
      cu_seqlens, state_indices, has_initial_state, checkpoint_offsets, checkpoint_indices, parameters, group.z,
      parameters.value_size, 1, parameters.counted_chunk_size, errors, group, simdgroup, lane);
  const LanePosition at = lane_position(lane);

  float2 state[kDepths];
  load_first_state<K, kKeys>(
      state, own, initial_state, final_state, parameters, query_tile, thread_index, simdgroup, at);

  const Sources<T> from = sources_of(q, k, v, g, beta, parameters, own);
  ChannelGate channel_gates[kItems];
  int64_t gate_elements[kItems];
  UNROLL for (int n = 0; n < kItems; ++n) {
    const ChannelItem item = channel_item<kBlocks, kPadded>(n * kStateThreads + thread_index);
    channel_gates[n] = channel_gate_of(A_log, dt_bias, all.gate, own.head, item.channel, K);
    gate_elements[n] = own.sequence.batch * all.gate.g.batch + own.head * all.gate.g.head +
                       (int64_t(own.sequence.first) + item.block * 8) * all.gate.g.token + item.channel;
  }
  for (int i = int(thread_index); i < 2 * kBlocks * kMatrixFloats; i += kStateThreads) minus_A[i] = 0.0f;
  const int last_read =
      own.slot.is_present ? own.sequence.last : own.sequence.first;  // without a slot, all results are zeros
  Tokens<T, Vector, kRounds, kVectors> next;
  float next_gates[kItems * 8];
  load_tokens<K, Width>(next, from, parameters, own.sequence.first, last_read - own.sequence.first, lane, simdgroup);
  load_gates<kPadded, kBlocks, kItems>(
      next_gates, gate_elements, g, all.gate, K, last_read - own.sequence.first, thread_index);

  const int64_t first_kept = own_columns(own, parameters.final_state);
  const int64_t first_output = own.sequence.batch * parameters.o.batch + own.head * parameters.o.head + own.first_value;
  for (int first = own.sequence.first; first < own.sequence.last; first += C) {
    const int count = last_read - first;
    store_tokens<kPadded, Width>(next, query_tile, key_tile, value_tile, betas, parameters, count, lane, simdgroup);
    store_decays<kPadded, kBlocks, kItems>(decay_tile, kept, next_gates, channel_gates, all.gate, count, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int block = 0; block < kBlocks; ++block) {
      form_matrices<kPadded>(
          minus_A + block * kMatrixFloats, scores + block * kMatrixFloats, query_tile + block * 8 * kStride, kTile,
          betas + block * 8, lane, simdgroup);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int n = 0; n < kItems; ++n) {
      const ChannelItem item = channel_item<kBlocks, kPadded>(n * kStateThreads + thread_index);
      if (item.is_there) decay_block(query_tile + item.block * 8 * kStride + item.channel, kTile, kStride);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (int block = 0; block < kBlocks; ++block) {
      const int corner = block * 8 * kStride;
      float2 key_read = float2(0.0f);
      float2 output = float2(0.0f);
      UNROLL for (int depth = 0; depth < kDepths; ++depth) {
        multiply_add(key_read, load_even_fragment(key_tile + corner + depth * 8, kStride, at), state[depth]);
        multiply_add(output, load_even_fragment(query_tile + corner + depth * 8, kStride, at), state[depth]);
      }
      threadgroup float* own_values = value_tile + block * 8 * kValueStride + int(simdgroup) * 8;
      float2 v_new = betas[block * 8 + at.row] * (load_even_fragment(own_values, kValueStride, at) - key_read);
      substitute(minus_A + block * kMatrixFloats, v_new, lane, at);
      multiply_add(output, load_even_fragment(scores + block * kMatrixFloats, kMatrixStride, at), v_new);
      store_even_fragment(own_values, kValueStride, at, output);
      if (block == kBlocks - 1) {  // late, so that only S and v_new share the registers with the next chunk
        load_tokens<K, Width>(next, from, parameters, first + C, count - C, lane, simdgroup);
      }
      UNROLL for (int depth = 0; depth < kDepths; ++depth) {
        const float2 decay = kept[block * kPadded + depth * 8 + at.row];
        float2 change = decay.y * state[depth];  // rounded once with the update, because both may be small
        multiply_add(change, load_transposed(decay_tile + corner + depth * 8, kStride, at), v_new);
        state[depth] = decay.x * state[depth] + change;
      }
    }
    load_gates<kPadded, kBlocks, kItems>(next_gates, gate_elements, g, all.gate, K, count - C, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    write_outputs<C>(o, value_tile, first_output, parameters, first, own.sequence.last, own.values, lane, simdgroup);
    if (first + C - own.sequence.first == own.checkpoint.tokens && own.slot.is_present) {
      store_state<K, kKeys>(
          state, final_state + (first_kept + own.checkpoint.index * parameters.final_state.sequence),
          parameters.final_state, own.values, query_tile, thread_index, simdgroup, at);
    }
  }

  if (parameters.has_final_state != 0 && own.slot.is_present) {
    store_state<K, kKeys>(
        state, final_state + (first_kept + own.slot.index * parameters.final_state.sequence), parameters.final_state,
        own.values, query_tile, thread_index, simdgroup, at);
  }
}
