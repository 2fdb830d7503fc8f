// Computes the rule of fused_recurrent_gated_delta_rule for one token per sequence, without decays of channels. It
// divides S and orders sums as that kernel does, so the bits are the same. Without a loop over tokens, S takes fewer
// registers.
// A threadgroup owns 32 value rows of one head of one sequence. Each of its 4 simdgroups owns 8 rows, with 8 lanes per
// row. For K over 128, each of its 8 simdgroups owns 4 rows, with 16 lanes per row.
// Registers: a lane's part of two rows of S, as float4.
// Threadgroup memory: q, k and the gates. If V is the inner dimension, also two parts of S that move from or to device
// memory.
// Layout: q and k [B, 1, H, K] and v and o [B, 1, HV, V] in T, with strides of batch and head; g and beta [B, 1, HV]
// with any strides and float dtype, final or raw; states [N, HV, ...] with any strides of K and V. In place, both
// states are a pool of P slots.
//     S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q
#include "gdn/recurrent_step.h"

template <typename T, int K, bool ValueInner, bool Normalise, typename P>
[[kernel]] void fused_recurrent_gated_delta_rule_token(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]],
    device const uchar* g [[buffer(3)]],
    device const uchar* beta [[buffer(4)]],
    device const uchar* A_log [[buffer(5)]],
    device const uchar* dt_bias [[buffer(6)]],
    device const P* initial_state [[buffer(7)]],
    device const int* state_indices [[buffer(8)]],
    device const uchar* has_initial_state [[buffer(9)]],
    device T* o [[buffer(10)]],
    device P* final_state [[buffer(11)]],
    device ErrorLog* errors [[buffer(12)]],
    constant FusedRecurrentParameters& parameters [[buffer(13)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kParts = Division<K>::kParts;
  constexpr int kPadded = Division<K>::kPadded;
  constexpr int kScratch = ValueInner ? (kParts > 1 ? 2 : 1) * Division<K>::kPartFloats : 4;
  static_assert(K >= 1 && K <= 256, "K is at most 256");
  static_assert(kPadded <= Division<K>::kThreads, "a thread has at most one element of q, and one of k");
  alignas(16) threadgroup float scratch[kScratch];
  alignas(16) threadgroup float rows[2 * kPadded];  // q, k
  threadgroup Decay decay;
  threadgroup float own_beta;

  const RowPosition at = row_position<K>(simdgroup, lane);
  const int64_t n = int64_t(group.z);
  const int64_t head = int64_t(group.y);
  const int64_t key_head = key_head_of(int(group.y), parameters.heads);
  const int first_value = int(group.x) * kStateColumns;
  const int values = min(kStateColumns, parameters.value_size - first_value);
  const int64_t row = first_value + at.own_row;
  const bool has_row = at.own_row < values;
  const bool has_output = has_row && at.place < 2;  // the first two lanes of a row have its two outputs
  device T* output = o + n * parameters.o.batch + head * parameters.o.head + row;
  const Slot slot = locate_slot(state_indices, has_initial_state, parameters.slots, int(n), lane);
  if (!slot.is_present) {  // the sequence pads the batch: its outputs are zeros, and its token is not read
    if (group.x == 0 && group.y == 0 && thread_index == 0) report_slot(slot, n, parameters.sequence.op, errors);
    if (has_output) *output = T(0.0f);
    return;
  }

  // Issues all reads of inputs before anything waits for one of them.
  const int column = int(thread_index);
  const int64_t first_q = n * parameters.q.batch + key_head * parameters.q.head;
  const int64_t first_k = n * parameters.k.batch + key_head * parameters.k.head;
  T own_q = T(0.0f), own_k = T(0.0f), own_v = T(0.0f);
  if (column < K) {
    own_q = q[first_q + column];
    own_k = k[first_k + column];
  }
  if (has_row) own_v = v[n * parameters.v.batch + head * parameters.v.head + row];
  uint g_bits = 0u, beta_bits = 0u;
  if (thread_index == 0) {
    g_bits = gate_bits_at(g, parameters.gates, n, 0, head);
    beta_bits = beta_bits_at(beta, parameters.gates, n, 0, head, 0);
  }
  float4 state[2 * kParts];  // row r of part m has index 2 m + r
  UNROLL for (int i = 0; i < 2 * kParts; ++i) state[i] = float4(0.0f);
  if (parameters.has_initial_state != 0 && slot.has_state) {
    constant StateStrides& strides = parameters.initial_state;
    device const P* states = states_to_read(initial_state, final_state, parameters.slots) +
                             slot.index * strides.sequence + head * strides.head + first_value * strides.value;
    const RowMover<K, ValueInner, kScratch> mover{values, scratch, at, thread_index};
    mover.load(state, states, strides, parameters.initial_has_vectors != 0);
  }

  if (column < kPadded) {
    rows[column] = float(own_q);
    rows[kPadded + column] = float(own_k);
  }
  if (thread_index == 0) {
    decay = decay_from_log(log_decay_of_bits(g_bits, A_log, dt_bias, parameters.gates, head));
    own_beta = beta_of_bits(beta_bits, parameters.gates);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (Normalise) {
    normalise_rows<K>(rows, 2, simdgroup, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  decay_state<K>(state, decay);
  const float read = update_and_read<K>(state, rows + kPadded, rows, own_beta, float(own_v), at);
  if (has_output) *output = T(parameters.scale * read);
  if (parameters.has_final_state != 0) {
    constant StateStrides& strides = parameters.final_state;
    device P* states = final_state + slot.index * strides.sequence + head * strides.head + first_value * strides.value;
    const RowMover<K, ValueInner, kScratch> mover{values, scratch, at, thread_index};
    mover.store(state, states, strides, parameters.final_has_vectors != 0);
  }
}
