// One threadgroup owns 32 value rows of one value head of one sequence; each of its 4 simdgroups owns 8 rows, with 4
// lanes a row. In registers for the whole sequence: a lane's quarter of its row of S, K/4 floats, as float4 in turn.
// In threadgroup memory: q, k, v, decay and beta of 8 tokens, staged once, so that no token needs a barrier.
// Layout: q, k [B, T, H, K], v [B, T, HV, V] with row strides; g, beta [B, T, HV] f32; o [B, T, HV, V]; states
// [N, HV, ...] with any strides of K and V, moved through threadgroup memory where V is the inner one.
// S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q
#include "common/exponential.h"
#include "common/fragment.h"
#include "common/sequences.h"
#include "common/tile.h"

static constant constexpr const int kRows = 32;  // value rows of a threadgroup
static constant constexpr const int kThreads = 128;
static constant constexpr const int kStaged = 8;  // tokens that are staged at once: q and k take 16 KB at K = 256
static constant constexpr const int kScratchStride = kRows + 1;

// Where a thread stands: row of S within the threadgroup's 32, and which of the row's four lanes it is.
struct RowPosition {
  int row;
  int quarter;
};

// Elements [(4 m + quarter) * 4, + 4) of a row belong to quarter `quarter`, as float4 number m: 4 lanes read 64 bytes
// in a row where K is the inner dimension.
METAL_FUNC int first_element(int m, int quarter) { return (m * 4 + quarter) * 4; }

// S from memory. Where V is the inner dimension, 16 rows of K by 32 of V go through `scratch`, so that a simdgroup
// reads 128 bytes in a row; else each lane reads its own part.
template <int K, bool ValueInner>
METAL_FUNC void load_state(
    thread float4* state,
    device const float* source,
    StateStrides strides,
    int values,
    threadgroup float* scratch,
    RowPosition at,
    uint thread_index) {
  constexpr int kParts = (K + 15) / 16;
  UNROLL for (int m = 0; m < kParts; ++m) {
    if (ValueInner) {
      for (int item = int(thread_index); item < 16 * kRows; item += kThreads) {
        const int key = item / kRows;
        const int value = item % kRows;
        const bool inside = m * 16 + key < K && value < values;
        scratch[key * kScratchStride + value] =
            inside ? source[(m * 16 + key) * strides.key + value * strides.value] : 0.0f;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL for (int e = 0; e < 4; ++e) state[m][e] = scratch[(at.quarter * 4 + e) * kScratchStride + at.row];
      threadgroup_barrier(mem_flags::mem_threadgroup);
    } else {
      UNROLL for (int e = 0; e < 4; ++e) {
        const int key = first_element(m, at.quarter) + e;
        const bool inside = key < K && at.row < values;
        state[m][e] = inside ? source[key * strides.key + at.row * strides.value] : 0.0f;
      }
    }
  }
}

template <int K, bool ValueInner>
METAL_FUNC void store_state(
    thread const float4* state,
    device float* target,
    StateStrides strides,
    int values,
    threadgroup float* scratch,
    RowPosition at,
    uint thread_index) {
  constexpr int kParts = (K + 15) / 16;
  UNROLL for (int m = 0; m < kParts; ++m) {
    if (ValueInner) {
      UNROLL for (int e = 0; e < 4; ++e) scratch[(at.quarter * 4 + e) * kScratchStride + at.row] = state[m][e];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int item = int(thread_index); item < 16 * kRows; item += kThreads) {
        const int key = item / kRows;
        const int value = item % kRows;
        if (m * 16 + key < K && value < values) {
          target[(m * 16 + key) * strides.key + value * strides.value] = scratch[key * kScratchStride + value];
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    } else {
      UNROLL for (int e = 0; e < 4; ++e) {
        const int key = first_element(m, at.quarter) + e;
        if (key < K && at.row < values) target[key * strides.key + at.row * strides.value] = state[m][e];
      }
    }
  }
}

// The sum over the four lanes of a row; all four get it.
METAL_FUNC float sum_of_row(float4 part) {
  float sum = (part.x + part.y) + (part.z + part.w);
  sum += simd_shuffle_xor(sum, ushort(1));
  return sum + simd_shuffle_xor(sum, ushort(2));
}

// Up to kStaged rows of q or k as floats, padded with zeros to a multiple of 16.
template <typename T, int K>
METAL_FUNC void stage_floats(
    threadgroup float* tile, device const T* source, int64_t row_stride, int rows, uint thread_index) {
  constexpr int kPadded = (K + 15) / 16 * 16;
  for (int item = int(thread_index); item < rows * kPadded; item += kThreads) {
    const int row = item / kPadded;
    const int column = item % kPadded;
    tile[item] = column < K ? float(source[row * row_stride + column]) : 0.0f;
  }
}

// Divides the staged rows by their norms; simdgroup s takes every fourth row from s on.
template <int Padded>
METAL_FUNC void normalise_rows(threadgroup float* tile, int rows, uint simdgroup, uint lane) {
  for (int row = int(simdgroup); row < rows; row += kThreads / 32) {
    float sum = 0.0f;
    for (int column = int(lane); column < Padded; column += 32) {
      sum += tile[row * Padded + column] * tile[row * Padded + column];
    }
    const float scale = rsqrt(simd_sum(sum) + 1e-6f);
    for (int column = int(lane); column < Padded; column += 32) tile[row * Padded + column] *= scale;
  }
}

template <typename T, int K, bool ValueInner, bool Normalise>
[[kernel]] void fused_recurrent_gated_delta_rule(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]],
    device const float* g [[buffer(3)]],
    device const float* beta [[buffer(4)]],
    device const float* initial_state [[buffer(5)]],
    device const int64_t* bounds [[buffer(6)]],
    device T* o [[buffer(7)]],
    device float* final_state [[buffer(8)]],
    device ErrorLog* errors [[buffer(9)]],
    constant RecurrentParameters& parameters [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(K >= 1 && K <= 256, "K is at most 256");
  constexpr int kParts = (K + 15) / 16;
  constexpr int kPadded = kParts * 16;
  threadgroup float q_tile[kStaged * kPadded];
  threadgroup float k_tile[kStaged * kPadded];
  threadgroup float v_tile[kStaged * kRows];
  threadgroup float o_tile[kStaged * kRows];
  threadgroup float scratch[16 * kScratchStride];
  threadgroup Decay decay[kStaged];
  threadgroup float step[kStaged];

  const int target = int(group.z);
  const int64_t head = int64_t(group.y);
  const int64_t key_head = int(group.y) / parameters.ratio;
  const int first_value = int(group.x) * kRows;
  const int values = min(kRows, parameters.value_size - first_value);
  RowPosition at;
  at.row = int(simdgroup) * 8 + int(lane) / 4;
  at.quarter = int(lane) % 4;
  const Sequence sequence = locate_sequence(bounds, parameters.sequence, target, 1, lane);
  if (group.x == 0 && group.y == 0 && group.z == 0 && simdgroup == 0) {
    report_bounds(bounds, parameters.sequence, 0, errors, lane);
  }

  float4 state[kParts];
  UNROLL for (int m = 0; m < kParts; ++m) state[m] = float4(0.0f);
  if (parameters.has_initial_state != 0) {
    load_state<K, ValueInner>(
        state,
        initial_state + target * parameters.initial_state.sequence + head * parameters.initial_state.head +
            first_value * parameters.initial_state.value,
        parameters.initial_state, values, scratch, at, thread_index);
  }

  const int64_t batch_token = int64_t(sequence.batch) * parameters.sequence.tokens;
  device const T* queries = q + sequence.batch * parameters.q.batch + key_head * parameters.q.head;
  device const T* keys = k + sequence.batch * parameters.k.batch + key_head * parameters.k.head;
  device const T* fresh = v + sequence.batch * parameters.v.batch + head * parameters.v.head + first_value;
  for (int first = sequence.first; first < sequence.last; first += kStaged) {
    const int tokens = min(kStaged, sequence.last - first);
    const int64_t row = (batch_token + first) * parameters.value_heads + head;
    stage_floats<T, K>(q_tile, queries + first * parameters.q.token, parameters.q.token, tokens, thread_index);
    stage_floats<T, K>(k_tile, keys + first * parameters.k.token, parameters.k.token, tokens, thread_index);
    for (int item = int(thread_index); item < tokens * kRows; item += kThreads) {
      const int token = item / kRows;
      const int value = item % kRows;
      v_tile[item] = value < values ? float(fresh[(first + token) * parameters.v.token + value]) : 0.0f;
    }
    if (int(thread_index) < tokens) {
      decay[thread_index] = decay_of(g[row + int64_t(thread_index) * parameters.value_heads]);
      step[thread_index] = beta[row + int64_t(thread_index) * parameters.value_heads];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (Normalise) {
      normalise_rows<kPadded>(q_tile, tokens, simdgroup, lane);
      normalise_rows<kPadded>(k_tile, tokens, simdgroup, lane);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    for (int token = 0; token < tokens; ++token) {
      threadgroup const float* key = k_tile + token * kPadded;
      threadgroup const float* query = q_tile + token * kPadded;
      float4 part = float4(0.0f);
      const float factor = decay[token].factor;
      if (decay[token].weak) {
        UNROLL for (int m = 0; m < kParts; ++m) state[m] += factor * state[m];
      } else {
        UNROLL for (int m = 0; m < kParts; ++m) state[m] *= factor;
      }
      UNROLL for (int m = 0; m < kParts; ++m) {
        part += state[m] * *(threadgroup const float4*)(key + first_element(m, at.quarter));
      }
      const float update = step[token] * (v_tile[token * kRows + at.row] - sum_of_row(part));
      part = float4(0.0f);
      UNROLL for (int m = 0; m < kParts; ++m) {
        state[m] += update * *(threadgroup const float4*)(key + first_element(m, at.quarter));
        part += state[m] * *(threadgroup const float4*)(query + first_element(m, at.quarter));
      }
      const float output = parameters.scale * sum_of_row(part);
      if (at.quarter == 0) o_tile[token * kRows + at.row] = output;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int item = int(thread_index); item < tokens * kRows; item += kThreads) {
      const int token = item / kRows;
      const int value = item % kRows;
      if (value < values) {
        o[(row + int64_t(token) * parameters.value_heads) * parameters.value_size + first_value + value] =
            T(o_tile[item]);
      }
    }
  }

  if (parameters.has_final_state != 0) {
    store_state<K, ValueInner>(
        state,
        final_state + target * parameters.final_state.sequence + head * parameters.final_state.head +
            first_value * parameters.final_state.value,
        parameters.final_state, values, scratch, at, thread_index);
  }
}
