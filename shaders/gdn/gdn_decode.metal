// The second of two launches of a layer's decoding step. The first launch, causal_conv1d_update, reads q, k and v in
// the order of the projections, and writes the three of each token as one row. A single launch would be wrong: the
// value heads of a key head read the same channels of the convolution's state, and one of these heads would shift them.
// A threadgroup owns one value head of one sequence with all of its V columns, because the norm needs the sum of their
// squares. It has V / 32 times the threads that own 32 columns in the recurrent kernel. For Qwen3-Next's 32 heads of
// 128 x 128, this kernel has 32 threadgroups of 512 threads, and the recurrent kernel 128 of 128 threads. At batch 1,
// the busiest core then has 512 threads instead of 512 on a GPU of 40 cores, 1024 instead of 896 on 20 cores, and 2048
// instead of 1664 on 10 cores.
// Registers, for the whole sequence: a thread's part of two rows of S, as float4. Threadgroup memory: q, k and the
// outputs of one token. If V is the inner dimension, also a part of S that moves from or to device memory.
// OneToken is for sequences with one token and one slot each. Without the loop over tokens, fewer values stay in
// registers, and S is stored before the norm waits for all outputs. The bits are the same as with the loop.
// Layout: mixed [B, T, H K + H K + HV V] in T, contiguous; raw g and beta, and z, with any strides and float dtype;
// states [slots, HV, ...] with any strides of K and V. With state_indices [N, tokens], each token has a slot for its
// state.
//     S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q
//     y = o rsqrt(mean of o^2 + eps) weight silu(z), or sigmoid(z)
#include "gdn/parameters.h"
#include "gdn/recurrent_step.h"

// The inputs of a token that a thread needs. They are read before anything waits for them. Only thread 0 has the gates.
template <typename T>
struct TokenReads {
  T q, k, v;
  uint g, beta, z;  // bits
  HeadGate gate;
};

template <typename T, int K, int V>
METAL_FUNC TokenReads<T> token_reads(
    device const T* mixed,
    device const uchar* g,
    device const uchar* beta,
    device const uchar* A_log,
    device const uchar* dt_bias,
    device const uchar* z,
    constant GdnDecodeParameters& parameters,
    int64_t batch,
    int64_t token,
    int head,
    int own_value,
    int thread_index) {
  const int64_t keys = int64_t(parameters.key_heads) * K;
  const int64_t key_head = head / parameters.group_heads;
  const int64_t member = head % parameters.group_heads;
  const int64_t row = batch * parameters.sequence.tokens + token;
  device const T* channels = mixed + row * (2 * keys + int64_t(parameters.value_heads) * V);
  TokenReads<T> reads;
  reads.q = reads.k = reads.v = T(0.0f);
  if (thread_index < K) {
    reads.q = channels[key_head * K + thread_index];
    reads.k = channels[keys + key_head * K + thread_index];
  }
  if (own_value < V) reads.v = channels[2 * keys + int64_t(head) * V + own_value];
  if (thread_index == 0) {
    constant GateParameters& gates = parameters.gates;
    reads.g = read_bits(
        g, batch * gates.g.batch + token * gates.g.token + key_head * parameters.g_group + member * gates.g.head,
        gates.g_type);
    reads.beta = read_bits(
        beta,
        batch * gates.beta.batch + token * gates.beta.token + key_head * parameters.beta_group +
            member * gates.beta.head,
        gates.beta_type);
    reads.gate = head_gate_of(A_log, dt_bias, gates, head);
  }
  const int64_t gate_row = batch * parameters.z.batch + token * parameters.z.token + key_head * parameters.z.group +
                           member * parameters.z.head;
  reads.z = thread_index < V ? read_bits(z, gate_row + thread_index, parameters.z_type) : 0u;
  return reads;
}

template <typename T, int K, int V, bool ValueInner, typename P, bool OneToken = false>
[[kernel, max_total_threads_per_threadgroup(decode_threads(K, V))]] void gdn_decode(
    device const T* mixed [[buffer(0)]],
    device const uchar* g [[buffer(1)]],
    device const uchar* beta [[buffer(2)]],
    device const uchar* A_log [[buffer(3)]],
    device const uchar* dt_bias [[buffer(4)]],
    device const uchar* z [[buffer(5)]],
    device const uchar* weight [[buffer(6)]],
    device const int* num_accepted_tokens [[buffer(7)]],
    device const int* cu_seqlens [[buffer(8)]],
    device const int* state_indices [[buffer(9)]],
    device const uchar* has_initial_state [[buffer(10)]],
    device T* o [[buffer(11)]],
    device P* states [[buffer(12)]],
    device ErrorLog* errors [[buffer(13)]],
    constant GdnDecodeParameters& parameters [[buffer(14)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kBlockThreads = Division<K>::kThreads;
  constexpr int kParts = Division<K>::kParts;
  constexpr int kPadded = Division<K>::kPadded;
  constexpr int kPartFloats = Division<K>::kPartFloats;
  constexpr int kBlocks = (V + kStateColumns - 1) / kStateColumns;
  static_assert(K >= 1 && kPadded <= kBlockThreads, "a thread has at most one element of q, and one of k");
  static_assert(V >= 1 && decode_threads(K, V) <= 1024, "a threadgroup has all columns");
  alignas(16) threadgroup float rows[2 * kPadded];  // q, k
  threadgroup float outputs[kBlocks * kStateColumns];
  threadgroup Decay decay;
  threadgroup float own_beta;
  alignas(16) threadgroup float scratch[ValueInner ? kBlocks * kPartFloats : 4];

  const int block = int(simdgroup) / (kBlockThreads / 32);
  const uint block_thread = thread_index % uint(kBlockThreads);
  const RowPosition at = row_position<K>(simdgroup % uint(kBlockThreads / 32), lane);
  const int first_value = block * kStateColumns;
  const int values = min(kStateColumns, V - first_value);
  const int column = int(thread_index);  // the thread computes the norm and the gate of this column if it is below V
  threadgroup float* own_scratch = scratch + (ValueInner ? block * kPartFloats : 0);

  const int columns = OneToken ? 0 : parameters.slots.columns;  // columns of state_indices; 0 for one slot per sequence
  const int n = int(group.y);
  const int head = int(group.x);
  const int64_t first_entry = int64_t(n) * max(columns, 1);
  const Sequence sequence = locate_sequence(cu_seqlens, parameters.sequence, n, 1, lane);
  const AcceptedCount accepted = accepted_count(num_accepted_tokens, parameters.slots, n, max(columns, 1));
  const int64_t entry = first_entry + accepted.tokens - 1;
  const Slot start = locate_entry(state_indices, parameters.slots, entry, n, lane);
  if (head == 0 && simdgroup == 0 && columns > 0) {  // the convolution reports the other errors
    if (lane == 0) report_slot(start, entry, parameters.sequence.op, errors);
    report_token_slots(
        sequence, state_indices, num_accepted_tokens, parameters.slots, parameters.sequence.op, accepted, n, errors,
        lane);
  }
  device T* output = o + sequence.batch * parameters.o.batch + head * parameters.o.head + column;
  if (!start.is_present) {  // the sequence pads the batch: its outputs are zeros, and none of its tokens is read
    for (int token = sequence.first; token < sequence.last && column < V; ++token) {
      output[token * parameters.o.token] = T(0.0f);
    }
    return;
  }

  const bool has_state = has_initial_state_of(has_initial_state, parameters.slots, n);
  const float own_weight =
      parameters.weight_type != kAbsent && column < V ? read_float(weight, column, parameters.weight_type) : 1.0f;
  device P* own_states = states + head * parameters.states.head + first_value * parameters.states.value;
  float4 state[2 * kParts];  // row r of part m has index 2 m + r
  UNROLL for (int i = 0; i < 2 * kParts; ++i) state[i] = float4(0.0f);
  int token = sequence.first;
  do {
    const bool has_token = OneToken || token < sequence.last;
    if (has_token) {
      const TokenReads<T> reads = token_reads<T, K, V>(
          mixed, g, beta, A_log, dt_bias, z, parameters, sequence.batch, token, head, first_value + at.own_row, column);
      if (token == sequence.first && has_state) {
        const RowMover<K, ValueInner, kPartFloats> mover{values, own_scratch, at, block_thread};
        mover.load(
            state, own_states + start.index * parameters.states.sequence, parameters.states,
            parameters.has_state_vectors != 0);
      }
      if (column < kPadded) {
        rows[column] = float(reads.q);
        rows[kPadded + column] = float(reads.k);
      }
      if (thread_index == 0) {
        decay = decay_from_log(log_decay_of(float_of_bits(reads.g, parameters.gates.g_type), reads.gate));
        own_beta = beta_of_bits(reads.beta, parameters.gates);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      normalise_rows<K>(rows, 2, simdgroup, lane);
      threadgroup_barrier(mem_flags::mem_threadgroup);

      decay_state<K>(state, decay);
      const float read = update_and_read<K>(state, rows + kPadded, rows, own_beta, float(reads.v), at);
      if (at.place < 2) outputs[first_value + at.own_row] = parameters.scale * read;
      if (OneToken) {
        const RowMover<K, ValueInner, kPartFloats> mover{values, own_scratch, at, block_thread};
        mover.store(
            state, own_states + start.index * parameters.states.sequence, parameters.states,
            parameters.has_state_vectors != 0);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (int(simdgroup) * 32 < V) {  // takes a whole simdgroup, because its lanes add up together
        float sum = 0.0f;
        for (int i = int(lane); i < V; i += 32) sum += outputs[i] * outputs[i];
        float result = outputs[min(column, V - 1)] * rsqrt(simd_sum(sum) / float(V) + parameters.eps);
        if (parameters.round_norm != 0) result = float(T(result));
        if (parameters.weight_type != kAbsent) result *= own_weight;
        if (parameters.round_product != 0) result = float(T(result));
        const float logit = float_of_bits(reads.z, parameters.z_type);
        const float sigmoid = sigmoid_of(logit);
        result *= parameters.has_sigmoid != 0 ? sigmoid : logit * sigmoid;
        if (column < V) output[token * parameters.o.token] = T(result);
      }
    }

    if (OneToken) break;
    Slot kept = start;
    if (columns > 0) {
      const int position = token - sequence.first;
      kept = locate_entry(state_indices, parameters.slots, first_entry + min(position, columns - 1), n, lane);
      kept.is_present = kept.is_present && has_token && position < columns;
      round_state<2 * kParts, P>(state);
    }
    ++token;
    const bool is_changed = has_token || !has_state;  // a new sequence without tokens gets a state of zeros
    if (kept.is_present && is_changed && (columns > 0 || token >= sequence.last)) {
      const RowMover<K, ValueInner, kPartFloats> mover{values, own_scratch, at, block_thread};
      mover.store(
          state, own_states + kept.index * parameters.states.sequence, parameters.states,
          parameters.has_state_vectors != 0);
    }
  } while (token < sequence.last);
}
