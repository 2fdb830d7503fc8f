// One threadgroup owns 32 columns of V of one value head of one sequence and walks its tokens in chunks of C; each of
// its 4 simdgroups owns 8 columns. In registers for the whole sequence: S [K, 8] in f32; for a chunk: what of S is read
// by its keys and queries, and v_new, [C, 8] each; and the next chunk's rows, on their way from device memory.
// In threadgroup memory: q, k and v of a chunk, each read once, and its two C x C matrices. In device memory: nothing
// but inputs and outputs.
// Layout: q, k [B, T, H, K], v [B, T, HV, V] with row strides; g, beta [B, T, HV] of any strides and float dtype, or
// raw; o [B, T, HV, V], T or f32; states [N, HV, ...] with any strides of K and V, moved through threadgroup memory. In
// place, both states are a pool of type P, in which a sequence has a slot.
// (I + A) v_new = beta (v - exp(c) S^T k), A_ij = beta_i (k_i . k_j) exp(c_i - c_j) for i > j, is solved in blocks of 8
// rows, each by forward substitution in registers: no inverse, no w, no Neumann series. Then
// o = scale (exp(c) S^T q + tril(q k^T exp(c_i - c_j)) v_new);  S <- exp(c_last) S + (k exp(c_last - c))^T v_new
#include "core/fragment.h"
#include "core/gates.h"
#include "core/sequences.h"
#include "core/slots.h"
#include "core/tile.h"
#include "gdn/fused_chunk_gated_delta_rule.h"

GDN_CONSTANT int kSimdgroups = kStateThreads / 32;
GDN_CONSTANT int kValueStride = kStateColumns + 4;  // 4 banks further each row
GDN_CONSTANT int kScratchStride = kStateColumns + 1;

// How many keys of S go through `floats` of threadgroup memory at once: whole lines of 128 bytes where it can be.
METAL_FUNC constexpr int staged_keys(int floats) {
  return floats >= 64 * kScratchStride   ? 64
         : floats >= 32 * kScratchStride ? 32
         : floats >= 16 * kScratchStride ? 16
                                         : 8;
}

// Where an item of a [keys, 32] part of S lies, in the order in which a simdgroup's lanes touch neighbours in memory.
struct StateItem {
  int key, value;
};

METAL_FUNC StateItem state_item(int item, int keys, bool value_inner) {
  StateItem at;
  at.key = value_inner ? item / kStateColumns : item % keys;
  at.value = value_inner ? item % kStateColumns : item / keys;
  return at;
}

// S [K, 32] from memory, through `scratch`: a simdgroup reads 128 bytes in a row, in either layout.
template <int K, int Keys, typename P>
METAL_FUNC void load_state(
    thread float2* state,
    device const P* source,
    StateStrides strides,
    int values,
    threadgroup float* scratch,
    uint thread_index,
    uint simdgroup,
    LanePosition at) {
  UNROLL for (int first = 0; first < K; first += Keys) {
    for (int item = int(thread_index); item < Keys * kStateColumns; item += kSimdgroups * 32) {
      const StateItem of = state_item(item, Keys, strides.value <= strides.key);
      const bool inside = first + of.key < K && of.value < values;
      scratch[of.key * kScratchStride + of.value] =
          inside ? float(source[(first + of.key) * strides.key + of.value * strides.value]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int row = 0; row < Keys && first + row < K; row += 8) {
      state[(first + row) / 8] = load_fragment(scratch + row * kScratchStride + int(simdgroup) * 8, kScratchStride, at);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

template <int K, int Keys, typename P>
METAL_FUNC void store_state(
    thread const float2* state,
    device P* target,
    StateStrides strides,
    int values,
    threadgroup float* scratch,
    uint thread_index,
    uint simdgroup,
    LanePosition at) {
  UNROLL for (int first = 0; first < K; first += Keys) {
    UNROLL for (int row = 0; row < Keys && first + row < K; row += 8) {
      store_fragment(scratch + row * kScratchStride + int(simdgroup) * 8, kScratchStride, at, state[(first + row) / 8]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int item = int(thread_index); item < Keys * kStateColumns; item += kSimdgroups * 32) {
      const StateItem of = state_item(item, Keys, strides.value <= strides.key);
      if (first + of.key < K && of.value < values) {
        target[(first + of.key) * strides.key + of.value * strides.value] =
            P(scratch[of.key * kScratchStride + of.value]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// What one simdgroup brings in for a chunk: every fourth token. Of a row of q and k a lane holds packets, of v a
// column.
template <typename Values, int Rounds, int Packets>
struct Tokens {
  Values queries[Rounds][Packets];
  Values keys[Rounds][Packets];
  float values[Rounds];
  float gates[Rounds];
  float steps[Rounds];
};

// Where they come from: q, k and v of a head of a sequence's batch row, at their first token.
template <typename T>
struct Sources {
  device const T* q;
  device const T* k;
  device const T* v;
  device const uchar* g;
  device const uchar* beta;
  int64_t batch, head;
  int values;  // columns of v
};

// A lane's packets of a row of q or k; zeros where there is no row.
template <int K, int Packets, int Width, typename Values, typename T>
METAL_FUNC void load_row(thread Values* packets, device const T* source, bool is_there, uint lane) {
  UNROLL for (int n = 0; n < Packets; ++n) {
    const int column = (n * 32 + int(lane)) * Width;
    packets[n] = is_there && column < K ? Values(*(device const Values*)(source + column)) : Values(T(0));
  }
}

template <int Padded, int Packets, int Width, typename Values, typename T>
METAL_FUNC void store_row(threadgroup T* target, thread const Values* packets, uint lane) {
  UNROLL for (int n = 0; n < Packets; ++n) {
    const int column = (n * 32 + int(lane)) * Width;
    if (column < Padded) *(threadgroup Values*)(target + column) = packets[n];
  }
}

// 1 / ||x|| of a row that lies in the lanes' packets.
template <int Packets, int Width, typename Values>
METAL_FUNC float inverse_norm(thread const Values* packets) {
  float sum = 0.0f;
  UNROLL for (int n = 0; n < Packets; ++n) {
    if constexpr (Width == 1) {
      sum += float(packets[n]) * float(packets[n]);
    } else {
      UNROLL for (int e = 0; e < Width; ++e) sum += float(packets[n][e]) * float(packets[n][e]);
    }
  }
  return rsqrt(simd_sum(sum) + 1e-6f);
}

// x <- (I - L)^-1 x for a strictly lower triangular L of 8 rows: row i is done once those above it are taken off.
METAL_FUNC void substitute(float2 lower, thread float2& x, uint lane) {
  UNROLL for (int i = 0; i < 7; ++i) {
    // The lanes that hold column i of L's row and row i of x's columns: lane_position(), backwards.
    const ushort of_row = ushort((lane & 0x16) | ((i >> 2) << 3) | ((i >> 1) & 1));
    const ushort of_column = ushort((lane & 0x09) | ((i >> 2) << 4) | ((i & 3) << 1));
    const float factor = simd_shuffle(i % 2 == 0 ? lower.x : lower.y, of_row);
    x += factor * float2(simd_shuffle(x.x, of_column), simd_shuffle(x.y, of_column));
  }
}

// What belongs to a token, g and beta as they were handed over until they are read.
struct TokenScalars {
  float gate, step;
  float query_norm, key_norm;  // 1 over it; 1 where rows are not divided by their norms
};

// Tokens [first, first + C), of which `count` are there. A gate is read by all lanes at once:
// one line of memory a token.
template <int K, int Width, typename Values, int Rounds, int Packets, typename T>
METAL_FUNC void load_tokens(
    thread Tokens<Values, Rounds, Packets>& tokens,
    Sources<T> from,
    constant FusedChunkParameters& parameters,
    int first,
    int count,
    uint lane,
    uint simdgroup) {
  UNROLL for (int round = 0; round < Rounds; ++round) {
    const int row = round * kSimdgroups + int(simdgroup);
    const int64_t token = first + row;
    const bool is_there = row < count;
    load_row<K, Packets, Width>(tokens.queries[round], from.q + token * parameters.q.token, is_there, lane);
    load_row<K, Packets, Width>(tokens.keys[round], from.k + token * parameters.k.token, is_there, lane);
    tokens.values[round] =
        is_there && int(lane) < from.values ? float(from.v[token * parameters.v.token + int(lane)]) : 0.0f;
    tokens.gates[round] = is_there ? raw_gate_at(from.g, parameters.gates, from.batch, token, from.head) : 0.0f;
    tokens.steps[round] = is_there ? raw_beta_at(from.beta, parameters.gates, from.batch, token, from.head, 0) : 0.0f;
  }
}

// A chunk's rows into threadgroup memory.
template <int Padded, int Width, typename Values, int Rounds, int Packets, typename T>
METAL_FUNC void store_tokens(
    thread const Tokens<Values, Rounds, Packets>& tokens,
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
    store_row<Padded, Packets, Width>(query_tile + row * kStride, tokens.queries[round], lane);
    store_row<Padded, Packets, Width>(key_tile + row * kStride, tokens.keys[round], lane);
    value_tile[row * kValueStride + int(lane)] = tokens.values[round];
    float query_norm = 1.0f;
    float key_norm = 1.0f;
    if (has_norm) {
      query_norm = inverse_norm<Packets, Width>(tokens.queries[round]);
      key_norm = inverse_norm<Packets, Width>(tokens.keys[round]);
    }
    if (lane == 0) {
      scalars[row].gate = tokens.gates[round];
      scalars[row].step = tokens.steps[round];
      scalars[row].query_norm = query_norm;
      scalars[row].key_norm = key_norm;
    }
  }
}

// -A and, behind it, tril(q k^T exp(c_i - c_j)): the blocks on and below the diagonal, shared among the simdgroups.
// Lane i has c, the step and the norms of token i. The key tile lies behind the query tile.
template <int Padded, int C, typename T>
METAL_FUNC void form_matrices(
    threadgroup float* minus_A,
    threadgroup const T* query_tile,
    float c,
    float step,
    float query_norm,
    float key_norm,
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
    const float own = simd_shuffle(c, ushort(i));
    const float2 other = float2(simd_shuffle(c, ushort(j)), simd_shuffle(c, ushort(j + 1)));
    const float factor = simd_shuffle(is_A ? -step * key_norm : query_norm, ushort(i));
    product *= factor * float2(simd_shuffle(key_norm, ushort(j)), simd_shuffle(key_norm, ushort(j + 1)));
    const int below = is_A ? i - 1 : i;  // the last column that counts
    product.x = j <= below ? product.x * gate_exp(own - other.x) : 0.0f;
    product.y = j + 1 <= below ? product.y * gate_exp(own - other.y) : 0.0f;
    store_fragment(
        minus_A + (is_A ? 0 : C * kMatrixStride) + row * 8 * kMatrixStride + column * 8, kMatrixStride, at, product);
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
    device T* o [[buffer(11)]],
    device P* final_state [[buffer(12)]],
    device ErrorLog* errors [[buffer(13)]],
    constant FusedChunkParameters& parameters [[buffer(14)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(C == 8 || C == 16 || C == 32, "a chunk has 8, 16 or 32 tokens: no more than lanes");
  static_assert(K >= 1 && K <= 256, "K is at most 256");
  typedef typename Packet<T, Width>::type Values;
  constexpr int kDepths = (K + 7) / 8;
  constexpr int kPadded = kDepths * 8;
  constexpr int kBlocks = C / 8;
  constexpr int kRounds = C / kSimdgroups;
  constexpr int kVectors = (kPadded / Width + 31) / 32;
  constexpr int kStride = tile_stride<T>(kPadded);
  constexpr int kMatrixStride = C + 4;
  constexpr int kTileFloats = 2 * C * kStride * int(sizeof(T)) / 4;
  constexpr int kScratchFloats = kTileFloats > 8 * kScratchStride ? kTileFloats : 8 * kScratchStride;
  constexpr int kKeys = staged_keys(kScratchFloats);
  threadgroup float scratch[kScratchFloats];  // q and k of a chunk; at either end, parts of S
  threadgroup T* query_tile = (threadgroup T*)scratch;
  threadgroup T* key_tile = query_tile + C * kStride;
  threadgroup float value_tile[C * kValueStride];  // v, then o
  threadgroup float minus_A[2 * C * kMatrixStride];
  threadgroup float* scores = minus_A + C * kMatrixStride;
  threadgroup TokenScalars scalars[C];

  const int target = int(group.z);
  const int64_t head = int64_t(group.y);
  const int64_t key_head = key_head_of(int(group.y), parameters.heads);
  const int first_value = int(group.x) * kStateColumns;
  const int values = min(kStateColumns, parameters.value_size - first_value);
  const LanePosition at = lane_position(lane);
  const Sequence sequence = locate_sequence(cu_seqlens, parameters.sequence, target, 1, lane);
  const Slot slot = locate_slot(state_indices, has_initial_state, parameters.slots, target, lane);
  if (group.x == 0 && group.y == 0 && simdgroup == 0) {
    if (group.z == 0) report_cu_seqlens(cu_seqlens, parameters.sequence, parameters.counted_chunk_size, errors, lane);
    if (lane == 0) report_slot(slot, errors);
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
  from.g = g;
  from.beta = beta;
  from.batch = sequence.batch;
  from.head = head;
  from.values = values;
  const HeadGate head_gate = head_gate_of(A_log, dt_bias, parameters.gates, head);
  const int last_read = slot.is_present ? sequence.last : sequence.first;  // without a slot everything is zeros
  Tokens<Values, kRounds, kVectors> next;
  load_tokens<K, Width>(next, from, parameters, sequence.first, last_read - sequence.first, lane, simdgroup);

  for (int first = sequence.first; first < sequence.last; first += C) {
    store_tokens<kPadded, Width>(
        next, query_tile, key_tile, value_tile, scalars, parameters.has_norm != 0, lane, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_tokens<K, Width>(next, from, parameters, first + C, last_read - first - C, lane, simdgroup);

    // Lane i has what belongs to token i; c is the cumulative log decay, clamped so that its differences keep digits.
    const bool is_there = int(lane) < min(C, last_read - first);
    const float gate = is_there ? log_decay_of(scalars[lane].gate, head_gate) : 0.0f;
    const float c = simd_prefix_inclusive_sum(clamped_log_decay(gate));
    const float step = is_there ? beta_of(scalars[lane].step, parameters.gates) : 0.0f;
    const float key_norm = is_there ? scalars[lane].key_norm : 0.0f;
    const float query_norm = is_there ? parameters.scale * scalars[lane].query_norm : 0.0f;

    form_matrices<kPadded, C>(minus_A, query_tile, c, step, query_norm, key_norm, simdgroup, at);

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

    // v_new, by substitution of blocks and, in the diagonal block, of rows; and o
    float2 fresh[kBlocks];
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      const ushort i = ushort(block * 8 + at.row);
      const int corner = block * 8 * kMatrixStride;
      threadgroup float* own_values = value_tile + block * 8 * kValueStride + int(simdgroup) * 8;
      const float decay = gate_exp(simd_shuffle(c, i));
      const float2 seen = decay * simd_shuffle(key_norm, i) * key_read[block];
      fresh[block] = simd_shuffle(step, i) * (load_even_fragment(own_values, kValueStride, at) - seen);
      float2 output = decay * simd_shuffle(query_norm, i) * query_read[block];
      UNROLL for (int above = 0; above < block; ++above) {
        multiply_add(fresh[block], load_even_fragment(minus_A + corner + above * 8, kMatrixStride, at), fresh[above]);
        multiply_add(output, load_even_fragment(scores + corner + above * 8, kMatrixStride, at), fresh[above]);
      }
      substitute(load_even_fragment(minus_A + corner + block * 8, kMatrixStride, at), fresh[block], lane);
      multiply_add(output, load_even_fragment(scores + corner + block * 8, kMatrixStride, at), fresh[block]);
      store_fragment(own_values, kValueStride, at, output);
    }

    // S <- exp(c_last) S + (k exp(c_last - c))^T v_new
    const float last = simd_shuffle(c, ushort(C - 1));
    const Decay kept = decay_of(last);
    UNROLL for (int depth = 0; depth < kDepths; ++depth) {
      state[depth] = kept.weak ? state[depth] + kept.factor * state[depth] : kept.factor * state[depth];
    }
    const float weight = key_norm * gate_exp(last - c);
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      fresh[block] *= simd_shuffle(weight, ushort(block * 8 + at.row));
      UNROLL for (int depth = 0; depth < kDepths; ++depth) {
        const int corner = block * 8 * kStride + depth * 8;
        multiply_add(state[depth], load_transposed(key_tile + corner, kStride, at), fresh[block]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    UNROLL for (int round = 0; round < kRounds; ++round) {
      const int row = round * kSimdgroups + int(simdgroup);
      if (first + row < sequence.last && int(lane) < values) {
        const int64_t token = int64_t(sequence.batch) * parameters.sequence.tokens + first + row;
        const int64_t element = (token * parameters.value_heads + head) * parameters.value_size + first_value + lane;
        const float output = value_tile[row * kValueStride + int(lane)];
        if (parameters.output_is_f32 != 0) {
          ((device float*)o)[element] = output;
        } else {
          o[element] = T(output);
        }
      }
    }
  }

  if (parameters.has_final_state != 0 && slot.is_present) {
    store_state<K, kKeys>(
        state,
        final_state + slot.index * parameters.final_state.sequence + head * parameters.final_state.head +
            first_value * parameters.final_state.value,
        parameters.final_state, values, scratch, thread_index, simdgroup, at);
  }
}
