// A threadgroup owns 32 value rows of one head of one sequence. Each of its 4 simdgroups owns 8 rows, with 8 lanes per
// row. For K over 128, each of its 8 simdgroups owns 4 rows, with 16 lanes per row.
// Registers, for the whole sequence: a lane's part of two rows of S, as float4.
// Threadgroup memory: q, k, v, decay and beta of 8 tokens (4 with channels), so that no token needs a barrier.
// Layout: q and k [B, T, H, K] in T, v and o [B, T, HV, V] in any float dtypes, all with row strides; g and beta
// [B, T, HV] with any strides and float dtype, final or raw; states [N, HV, ...] with any strides of K and V. In place,
// both states are a pool of P slots.
// Channels adds decays gk [B, T, HV, K], final or raw with A_log and dt_bias; gv [B, T, HV, V]; and beta [B, T, HV, V].
// With state_indices [N, tokens], the kernel takes one token at a time, and stores the state after each token in the
// token's slot.
//     S <- exp(gk) exp(gv)^T exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q
#include "core/gates.h"
#include "core/tile.h"
#include "gdn/recurrent_step.h"
#include "gdn/state_threadgroup.h"

// Returns an element of rows of q or k, zero-padded to whole parts.
template <typename T, int K>
METAL_FUNC T row_element(device const T* source, int64_t row_stride, int item) {
  constexpr int kPadded = Division<K>::kPadded;
  const int column = item % kPadded;
  if (column >= K) return T(0.0f);
  return source[item / kPadded * row_stride + column];
}

// Reads gates as floats. `own` is the element at this thread's index.
template <typename T, int K>
METAL_FUNC void stage_floats(
    threadgroup float* tile, T own, device const T* source, int64_t row_stride, int rows, uint thread_index) {
  for (int item = int(thread_index); item < rows * Division<K>::kPadded; item += Division<K>::kThreads) {
    tile[item] = float(item == int(thread_index) ? own : row_element<T, K>(source, row_stride, item));
  }
}

// The addresses of a threadgroup's inputs.
template <typename T>
struct Inputs {
  device const T* q;  // q and k start at the rows of the head
  device const T* k;
  device const uchar* v;
  device const uchar* g;
  device const uchar* beta;
  int64_t batch, head, first_v;
  int first_value, values;
};

template <typename T>
METAL_FUNC uint value_bits(Inputs<T> from, constant FusedRecurrentParameters& parameters, int first, int item) {
  const int value = item % kStateColumns;
  const int64_t element = from.first_v + (first + item / kStateColumns) * parameters.v.token + value;
  return value < from.values ? read_bits(from.v, element, parameters.v_type) : 0u;
}

// The first inputs that a thread stages for a group of tokens. The thread reads them before it loads S and before it
// stages any. Otherwise each read would wait for the previous one, and these waits would take most of a decoding step.
template <typename T>
struct FirstReads {
  T q, k;
  uint v, g, beta;  // bits
};

template <typename T, int K, int BetaRows>
METAL_FUNC FirstReads<T> first_reads(
    Inputs<T> from, constant FusedRecurrentParameters& parameters, int first, int tokens, uint thread_index) {
  const int item = int(thread_index);
  const bool has_row = item < tokens * Division<K>::kPadded;
  FirstReads<T> reads;
  reads.q = has_row ? row_element<T, K>(from.q + first * parameters.q.token, parameters.q.token, item) : T(0.0f);
  reads.k = has_row ? row_element<T, K>(from.k + first * parameters.k.token, parameters.k.token, item) : T(0.0f);
  reads.v = item < tokens * kStateColumns ? value_bits(from, parameters, first, item) : 0u;
  reads.g = item < tokens ? gate_bits_at(from.g, parameters.gates, from.batch, first + item, from.head) : 0u;
  const int64_t column =
      BetaRows > 1 && parameters.channels.has_vector_beta != 0 ? from.first_value + item % BetaRows : 0;
  const bool has_beta = item < tokens * BetaRows && item % BetaRows < from.values;
  reads.beta =
      has_beta ? beta_bits_at(from.beta, parameters.gates, from.batch, first + item / BetaRows, from.head, column) : 0u;
  return reads;
}

// Splits gk or gv into two factors: S <- base S + change S. The base is 1 for weak decays and 0 for strong ones (struct
// Decay).
template <int Threads, bool HasGate>
METAL_FUNC void stage_decays(
    threadgroup float* base,
    threadgroup float* change,
    int padded,
    device const uchar* g,
    device const uchar* A_log,
    device const uchar* dt_bias,
    constant ChannelGateParameters& gates,
    int64_t origin,
    int64_t head,
    int rows,
    int columns,
    uint thread_index) {
  for (int item = int(thread_index); item < rows * padded; item += Threads) {
    const int row = item / padded;
    const int column = item % padded;
    float log_decay = 0.0f;
    if (gates.g_type != kAbsent && column < columns) {
      log_decay = read_float(g, origin + row * gates.g.token + column, gates.g_type);
      if (HasGate) {
        const ChannelGate gate = channel_gate_of(A_log, dt_bias, gates, head, column, columns);
        log_decay = channel_log_decay(log_decay, gate, gates);
      }
    }
    const Decay decay = decay_from_log(log_decay);
    base[item] = decay.weak ? 1.0f : 0.0f;
    change[item] = decay.factor;
  }
}

template <typename T, int K, bool ValueInner, bool Normalise, bool Channels, typename P>
[[kernel]] void fused_recurrent_gated_delta_rule(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const uchar* v [[buffer(2)]],
    device const uchar* g [[buffer(3)]],
    device const uchar* beta [[buffer(4)]],
    device const uchar* A_log [[buffer(5)]],
    device const uchar* dt_bias [[buffer(6)]],
    device const uchar* gk [[buffer(7)]],
    device const uchar* gv [[buffer(8)]],
    device const int* num_accepted_tokens [[buffer(9)]],
    device const P* initial_state [[buffer(10)]],
    device const int* cu_seqlens [[buffer(11)]],
    device const int* state_indices [[buffer(12)]],
    device const uchar* has_initial_state [[buffer(13)]],
    device const int* checkpoint_offsets [[buffer(14)]],
    device const int* checkpoint_indices [[buffer(15)]],
    device uchar* o [[buffer(16)]],
    device P* final_state [[buffer(17)]],
    device ErrorLog* errors [[buffer(18)]],
    constant FusedRecurrentParameters& parameters [[buffer(19)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(K >= 1 && K <= 256, "K is at most 256");
  constexpr int kThreads = Division<K>::kThreads;
  constexpr int kParts = Division<K>::kParts;
  constexpr int kPadded = Division<K>::kPadded;
  constexpr int kRowsApart = Division<K>::kRowsApart;
  constexpr int kPartFloats = Division<K>::kPartFloats;
  constexpr int kChunked = Channels ? 4 : 8;  // tokens at once: q, k and the decays of K take 16 KB at K = 256
  constexpr int kBetaRows = Channels ? kStateColumns : 1;  // one beta per value row, or one for all
  constexpr int kTileFloats = 2 * kChunked * kPadded;
  constexpr int kScratch = kTileFloats > kPartFloats ? kTileFloats : kPartFloats;
  alignas(16) threadgroup float scratch[kScratch];  // q and k; S before the first token and after the last
  threadgroup float* q_tile = scratch;
  threadgroup float* k_tile = scratch + kChunked * kPadded;
  threadgroup float v_tile[kChunked * kStateColumns];
  threadgroup float o_tile[kChunked * kStateColumns];
  threadgroup Decay decay[kChunked];
  threadgroup float beta_tile[kChunked * kBetaRows];
  alignas(16) threadgroup float key_base[Channels ? kChunked * kPadded : 1];
  alignas(16) threadgroup float key_change[Channels ? kChunked * kPadded : 1];
  threadgroup float value_base[Channels ? kChunked * kStateColumns : 1];
  threadgroup float value_change[Channels ? kChunked * kStateColumns : 1];

  const RowPosition at = row_position<K>(simdgroup, lane);
  const int columns = parameters.slots.columns;  // columns of state_indices; 0 for one slot per sequence
  const int64_t first_entry = int64_t(group.z) * max(columns, 1);
  const AcceptedCount accepted = accepted_count(num_accepted_tokens, parameters.slots, int(group.z), max(columns, 1));
  StateThreadgroup own = state_threadgroup(
      cu_seqlens, state_indices, has_initial_state, checkpoint_offsets, checkpoint_indices, parameters,
      first_entry + accepted.tokens - 1, parameters.value_size, 1, parameters.counted_chunk_size, errors, group,
      simdgroup, lane);
  if (group.x == 0 && group.y == 0 && simdgroup == 0) {
    report_token_slots(
        own.sequence, state_indices, num_accepted_tokens, parameters.slots, parameters.sequence.op, accepted,
        int(group.z), errors, lane);
  }

  Inputs<T> inputs;
  inputs.q = q + own.sequence.batch * parameters.q.batch + own.key_head * parameters.q.head;
  inputs.k = k + own.sequence.batch * parameters.k.batch + own.key_head * parameters.k.head;
  inputs.v = v, inputs.g = g, inputs.beta = beta;
  inputs.batch = own.sequence.batch, inputs.head = own.head;
  inputs.first_v = own.sequence.batch * parameters.v.batch + own.head * parameters.v.head + own.first_value;
  inputs.first_value = own.first_value, inputs.values = own.values;
  float4 state[2 * kParts];  // row r of part m has index 2 m + r
  UNROLL for (int i = 0; i < 2 * kParts; ++i) state[i] = float4(0.0f);
  const bool has_state = parameters.has_initial_state != 0 && own.slot.is_present && own.slot.has_state;

  device P* kept_states = final_state + own_columns(own, parameters.final_state);
  const int64_t first_output = own.sequence.batch * parameters.o.batch + own.head * parameters.o.head + own.first_value;
  // A sequence without a slot pads the batch. Its outputs are zeros, and the kernel reads none of its tokens.
  if (!own.slot.is_present) {
    const int value = int(thread_index) % kStateColumns;
    for (int row = own.sequence.first + int(thread_index) / kStateColumns;
         row < own.sequence.last && value < own.values; row += kThreads / kStateColumns) {
      write_float(o, first_output + row * parameters.o.token + value, parameters.o_type, 0.0f);
    }
    own.sequence.last = own.sequence.first;
  }
  int first = own.sequence.first;
  do {
    const int tokens = min(columns > 0 ? 1 : kChunked, own.sequence.last - first);
    const FirstReads<T> reads = first_reads<T, K, kBetaRows>(inputs, parameters, first, tokens, thread_index);
    if (has_state && first == own.sequence.first) {
      device const P* first_states = states_to_read(initial_state, final_state, parameters.slots);
      const RowMover<K, ValueInner, kScratch> mover{own.values, scratch, at, thread_index};
      mover.load(
          state,
          first_states + own.slot.index * parameters.initial_state.sequence +
              own_columns(own, parameters.initial_state),
          parameters.initial_state, parameters.initial_has_vectors != 0);
    }
    stage_floats<T, K>(
        q_tile, reads.q, inputs.q + first * parameters.q.token, parameters.q.token, tokens, thread_index);
    stage_floats<T, K>(
        k_tile, reads.k, inputs.k + first * parameters.k.token, parameters.k.token, tokens, thread_index);
    for (int item = int(thread_index); item < tokens * kStateColumns; item += kThreads) {
      const uint bits = item == int(thread_index) ? reads.v : value_bits(inputs, parameters, first, item);
      v_tile[item] = float_of_bits(bits, parameters.v_type);
    }
    if (int(thread_index) < tokens) {
      decay[thread_index] = decay_from_log(log_decay_of_bits(reads.g, A_log, dt_bias, parameters.gates, own.head));
    }
    if (int(thread_index) < tokens * kBetaRows) {
      const bool inside = int(thread_index) % kBetaRows < own.values;
      beta_tile[thread_index] = inside ? beta_of_bits(reads.beta, parameters.gates) : 0.0f;
    }
    if (Channels) {
      stage_decays<kThreads, true>(
          key_base, key_change, kPadded, gk, A_log, dt_bias, parameters.channels.gk,
          offset_of(parameters.channels.gk.g, own.sequence.batch, first, own.head), own.head, tokens, K, thread_index);
      stage_decays<kThreads, false>(
          value_base, value_change, kStateColumns, gv, A_log, dt_bias, parameters.channels.gv,
          offset_of(parameters.channels.gv.g, own.sequence.batch, first, own.head) + own.first_value, own.head, tokens,
          own.values, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (Normalise) {
      normalise_rows<K>(q_tile, tokens, simdgroup, lane);
      normalise_rows<K>(k_tile, tokens, simdgroup, lane);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    for (int token = 0; token < tokens; ++token) {
      threadgroup const float* key = k_tile + token * kPadded;
      threadgroup const float* query = q_tile + token * kPadded;
      if (Channels) {
        UNROLL for (int m = 0; m < kParts; ++m) {
          const int element = token * kPadded + first_element<K>(m, at.place);
          const float4 base = *(threadgroup const float4*)(key_base + element);
          const float4 change = *(threadgroup const float4*)(key_change + element);
          UNROLL for (int r = 0; r < 2; ++r) {
            const int row = token * kStateColumns + at.row + r * kRowsApart;
            state[2 * m + r] = base * state[2 * m + r] + change * state[2 * m + r];
            state[2 * m + r] = value_base[row] * state[2 * m + r] + value_change[row] * state[2 * m + r];
          }
        }
      }
      decay_state<K>(state, decay[token]);
      const float own_beta = beta_tile[Channels ? token * kStateColumns + at.own_row : token];
      const float own_value = v_tile[token * kStateColumns + at.own_row];
      const float output = parameters.scale * update_and_read<K>(state, key, query, own_beta, own_value, at);
      if (at.place < 2) o_tile[token * kStateColumns + at.own_row] = output;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int item = int(thread_index); item < tokens * kStateColumns; item += kThreads) {
      const int token = item / kStateColumns;
      const int value = item % kStateColumns;
      if (value < own.values) {
        const int64_t element = first_output + (first + token) * parameters.o.token + value;
        write_float(o, element, parameters.o_type, o_tile[item]);
      }
    }

    Slot kept = own.slot;
    if (columns > 0) {
      const int column = first - own.sequence.first;
      const bool has_column = column < columns && tokens > 0;
      kept = locate_entry(state_indices, parameters.slots, first_entry + min(column, columns - 1), int(group.z), lane);
      kept.is_present = kept.is_present && has_column && own.slot.is_present;
      round_state<2 * kParts, P>(state);
    }
    first += tokens;
    // Stores element by element, because this case is rare. A second copy of S as vectors would keep registers for
    // both.
    if (first - own.sequence.first == own.checkpoint.tokens && own.slot.is_present) {
      const RowMover<K, ValueInner, kScratch> mover{own.values, scratch, at, thread_index};
      mover.store(
          state, kept_states + own.checkpoint.index * parameters.final_state.sequence, parameters.final_state, false);
      if (ValueInner) threadgroup_barrier(mem_flags::mem_threadgroup);  // the next token uses scratch
    }
    if (parameters.has_final_state != 0 && kept.is_present && (columns > 0 || first >= own.sequence.last)) {
      const RowMover<K, ValueInner, kScratch> mover{own.values, scratch, at, thread_index};
      mover.store(
          state, kept_states + kept.index * parameters.final_state.sequence, parameters.final_state,
          parameters.final_has_vectors != 0);
      if (ValueInner && columns > 0) threadgroup_barrier(mem_flags::mem_threadgroup);  // the next token uses scratch
    }
  } while (first < own.sequence.last);
}
