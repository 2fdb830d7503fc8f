// The kernels that run the rule token by token share this code. It keeps S [K, 32] in registers, as rows of values or
// of keys, and moves it from and to device memory.
#pragma once
#include "core/gates.h"
#include "core/parameters.h"
#include "core/sequences.h"
#include "core/slots.h"
#include "gdn/parameters.h"

GDN_CONSTANT uint kTileColumns = kStateColumns;

// Says how a threadgroup divides S. A thread has two rows, which are `kRowsApart` apart, and one float4 in each part of
// both rows.
template <int K>
struct Division {
  enum {
    kThreads = recurrent_threads(K),
    kLanes = 2 * kThreads / kStateColumns,  // per row
    kRowsApart = 32 / kLanes,
    kPart = 4 * kLanes,  // keys per part
    kParts = (K + kPart - 1) / kPart,
    kPadded = kParts * kPart,
    kPartFloats = kPart * kStateColumns
  };
};

// The first of a thread's two rows among the threadgroup's 32, and the thread's index among the lanes of a row. Even
// lanes get the sums of the first row, odd lanes those of the second.
struct RowPosition {
  int row;
  int place;
  bool is_odd;
  int own_row;
};

template <int K>
METAL_FUNC RowPosition row_position(uint simdgroup, uint lane) {
  constexpr uint kLanes = Division<K>::kLanes;
  constexpr int kRowsApart = Division<K>::kRowsApart;
  const int row = int(simdgroup * 2 * uint(kRowsApart) + lane / kLanes);
  const bool is_odd = lane % 2 != 0;
  return {row, int(lane % kLanes), is_odd, row + (is_odd ? kRowsApart : 0)};
}

// Returns the key of a lane's float4 with index m. If K is the inner dimension, the lanes of a row read 128 or 256
// contiguous bytes.
template <int K>
METAL_FUNC int first_element(int m, int place) {
  return m * Division<K>::kPart + place * 4;
}

// The number of parts of S that fit in the threadgroup memory of q and k at once.
template <int K>
METAL_FUNC constexpr int parts_together(int floats) {
  return floats / Division<K>::kPartFloats < Division<K>::kParts ? floats / Division<K>::kPartFloats
                                                                 : Division<K>::kParts;
}

// Returns the position in threadgroup memory of a state's columns, in groups of 4 values. Groups are permuted by the
// key, so that both the groups of 4 keys and a column of 32 keys hit different banks.
METAL_FUNC int scratch_group(uint key, uint group) { return int((key * 8 + (group ^ (key / 4 % 8))) * 4); }

// Returns the key of a thread's vector with index `four` (of 2 * kParts) if V is the inner dimension. Each turn takes
// half the keys of a part. A thread takes a group of 4 values.
template <int K>
METAL_FUNC int own_key(int four, uint thread_index) {
  return four * (Division<K>::kPart / 2) + int(thread_index / 8);
}

METAL_FUNC int own_group(uint thread_index) { return int(thread_index % 8); }

// With ValueInner, the state goes through `scratch`, so that a simdgroup reads 128 contiguous bytes of each of 4 keys.
// All vectors are first loaded into the registers of S, because no load can move across a barrier. Without
// `has_vectors`, the state is read element by element, with any strides. Without ValueInner, the stride of keys is 1,
// and threads read 4 keys at once; if they read single elements, the compiler would keep 32 addresses in registers.
template <int K, bool ValueInner, int Scratch>
struct RowMover {
  enum {
    kPart = Division<K>::kPart,
    kParts = Division<K>::kParts,
    kRowsApart = Division<K>::kRowsApart,
    kTogether = parts_together<K>(Scratch)
  };
  int values;  // columns of S that exist
  threadgroup float* scratch;
  RowPosition at;
  uint thread_index;

  template <typename P>
  METAL_FUNC void load(thread float4* state, device const P* source, StateStrides strides, bool has_vectors) const {
    if (ValueInner) {
      if (has_vectors) {
        const int value = own_group(thread_index) * 4;
        device const P* origin = source + own_key<K>(0, thread_index) * strides.key + value;
        UNROLL for (int i = 0; i < 2 * kParts; ++i) {
          const bool inside = own_key<K>(i, thread_index) < K && value < values;
          state[i] = inside ? float4(*(device const vec<P, 4>*)origin) : float4(0.0f);
          origin += kPart / 2 * strides.key;
        }
      }
      UNROLL for (int first = 0; first < kParts; first += kTogether) {
        if (has_vectors) {
          UNROLL for (int n = 0; n < 2 * kTogether; ++n) {
            const int place = scratch_group(uint(own_key<K>(n, thread_index)), uint(own_group(thread_index)));
            if (2 * first + n < 2 * kParts) *(threadgroup float4*)(scratch + place) = state[2 * first + n];
          }
        } else {
          for (uint item = thread_index; item < uint(kTogether * Division<K>::kPartFloats);
               item += Division<K>::kThreads) {
            const int key = int(item / kTileColumns);
            const int value = int(item % kTileColumns);
            const bool inside = first * kPart + key < K && value < values;
            scratch[scratch_group(uint(key), uint(value) / 4) + value % 4] =
                inside ? float(source[(first * kPart + key) * strides.key + value * strides.value]) : 0.0f;
          }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        UNROLL for (int m = 0; m < kTogether; ++m) {
          UNROLL for (int e = 0; e < 8; ++e) {
            const uint key = uint(first_element<K>(m, at.place) + e % 4);
            const uint row = uint(at.row + e / 4 * kRowsApart);
            if (first + m < kParts) {
              state[2 * (first + m) + e / 4][e % 4] = scratch[scratch_group(key, row / 4) + int(row % 4)];
            }
          }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
    } else {
      UNROLL for (int r = 0; r < 2; ++r) {
        const int row = at.row + r * kRowsApart;
        device const P* keys = source + row * strides.value + first_element<K>(0, at.place);
        UNROLL for (int m = 0; m < kParts; ++m) {
          const bool inside = row < values && first_element<K>(m, at.place) < K;
          state[2 * m + r] = inside ? float4(*(device const vec<P, 4>*)(keys + m * kPart)) : float4(0.0f);
        }
      }
    }
  }

  template <typename P>
  METAL_FUNC void store(thread const float4* state, device P* target, StateStrides strides, bool has_vectors) const {
    if (ValueInner) {
      const int value = own_group(thread_index) * 4;
      device P* origin = target + own_key<K>(0, thread_index) * strides.key + value;
      UNROLL for (int first = 0; first < kParts; first += kTogether) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        UNROLL for (int m = 0; m < kTogether; ++m) {
          UNROLL for (int e = 0; e < 8; ++e) {
            const uint key = uint(first_element<K>(m, at.place) + e % 4);
            const uint row = uint(at.row + e / 4 * kRowsApart);
            if (first + m < kParts) {
              scratch[scratch_group(key, row / 4) + int(row % 4)] = state[2 * (first + m) + e / 4][e % 4];
            }
          }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (has_vectors) {
          UNROLL for (int n = 0; n < 2 * kTogether; ++n) {
            const int place = scratch_group(uint(own_key<K>(n, thread_index)), uint(own_group(thread_index)));
            const bool inside = own_key<K>(2 * first + n, thread_index) < K && value < values;
            if (inside) *(device vec<P, 4>*)origin = vec<P, 4>(*(threadgroup const float4*)(scratch + place));
            origin += kPart / 2 * strides.key;
          }
        } else {
          for (uint item = thread_index; item < uint(kTogether * Division<K>::kPartFloats);
               item += Division<K>::kThreads) {
            const int key = int(item / kTileColumns);
            const int column = int(item % kTileColumns);
            if (first * kPart + key < K && column < values) {
              target[(first * kPart + key) * strides.key + column * strides.value] =
                  P(scratch[scratch_group(uint(key), uint(column) / 4) + column % 4]);
            }
          }
        }
      }
    } else {
      UNROLL for (int r = 0; r < 2; ++r) {
        const int row = at.row + r * kRowsApart;
        device P* keys = target + row * strides.value + first_element<K>(0, at.place);
        UNROLL for (int m = 0; m < kParts; ++m) {
          const bool inside = row < values && first_element<K>(m, at.place) < K;
          if (inside) *(device vec<P, 4>*)(keys + m * kPart) = vec<P, 4>(state[2 * m + r]);
        }
      }
    }
  }
};

// Rounds S as a store followed by a load would.
template <int Count, typename P>
METAL_FUNC void round_state(thread float4* state) {
  UNROLL for (int i = 0; i < Count; ++i) state[i] = float4(vec<P, 4>(state[i]));
}

// Adds up the values of the lanes of the thread's own row. Two rows take 3 or 4 shuffles.
template <int K>
METAL_FUNC float sum_of_own_row(float4 first, float4 second, RowPosition at) {
  const float first_sum = (first.x + first.y) + (first.z + first.w);
  const float second_sum = (second.x + second.y) + (second.z + second.w);
  float sum = at.is_odd ? second_sum : first_sum;
  sum += simd_shuffle_xor(at.is_odd ? first_sum : second_sum, ushort(1));
  UNROLL for (ushort distance = 2; distance < Division<K>::kLanes; distance *= 2) {
    sum += simd_shuffle_xor(sum, distance);
  }
  return sum;
}

// Normalises rows of q or k in threadgroup memory. The simdgroups take turns at the rows.
template <int K>
METAL_FUNC void normalise_rows(threadgroup float* tile, int rows, uint simdgroup, uint lane) {
  constexpr int kPadded = Division<K>::kPadded;
  for (int row = int(simdgroup); row < rows; row += Division<K>::kThreads / 32) {
    float sum = 0.0f;
    for (int column = int(lane); column < kPadded; column += 32) {
      sum += tile[row * kPadded + column] * tile[row * kPadded + column];
    }
    const float scale = rsqrt(simd_sum(sum) + kNormEps);
    for (int column = int(lane); column < kPadded; column += 32) tile[row * kPadded + column] *= scale;
  }
}

// Computes S <- exp(g) S.
template <int K>
METAL_FUNC void decay_state(thread float4* state, Decay decay) {
  constexpr int kParts = Division<K>::kParts;
  const float factor = decay.factor;
  if (decay.weak) {
    UNROLL for (int m = 0; m < kParts; ++m) {
      UNROLL for (int r = 0; r < 2; ++r) state[2 * m + r] += factor * state[2 * m + r];
    }
  } else {
    UNROLL for (int m = 0; m < kParts; ++m) { UNROLL for (int r = 0; r < 2; ++r) state[2 * m + r] *= factor; }
  }
}

// Computes S <- S + k beta (v - S^T k)^T for the thread's own row, given `beta` and `value`. Returns the row's S^T q.
template <int K>
METAL_FUNC float update_and_read(
    thread float4* state,
    threadgroup const float* key,
    threadgroup const float* query,
    float beta,
    float value,
    RowPosition at) {
  constexpr int kParts = Division<K>::kParts;
  float4 part[2] = {float4(0.0f), float4(0.0f)};
  UNROLL for (int m = 0; m < kParts; ++m) {
    const float4 keys = *(threadgroup const float4*)(key + first_element<K>(m, at.place));
    UNROLL for (int r = 0; r < 2; ++r) part[r] += state[2 * m + r] * keys;
  }
  const float read = sum_of_own_row<K>(part[0], part[1], at);
  const float own_update = beta * (value - read);
  const float other_update = simd_shuffle_xor(own_update, ushort(1));
  const float update[2] = {at.is_odd ? other_update : own_update, at.is_odd ? own_update : other_update};
  UNROLL for (int r = 0; r < 2; ++r) part[r] = float4(0.0f);
  UNROLL for (int m = 0; m < kParts; ++m) {
    const float4 keys = *(threadgroup const float4*)(key + first_element<K>(m, at.place));
    const float4 queries = *(threadgroup const float4*)(query + first_element<K>(m, at.place));
    UNROLL for (int r = 0; r < 2; ++r) {
      state[2 * m + r] += update[r] * keys;
      part[r] += state[2 * m + r] * queries;
    }
  }
  return sum_of_own_row<K>(part[0], part[1], at);
}

// Reports wrong entries of state_indices [N, columns] and wrong counts in num_accepted_tokens. Does not report the
// entry that the sequence starts from. One simdgroup per sequence calls this.
METAL_FUNC void report_token_slots(
    Sequence own,
    device const int* state_indices,
    device const int* num_accepted_tokens,
    constant SlotParameters& slots,
    constant const OpName& op,
    AcceptedCount accepted,
    int sequence,
    device ErrorLog* errors,
    uint lane) {
  const int columns = slots.columns;
  const int tokens = own.last - own.first;
  const int64_t first_entry = int64_t(sequence) * columns;
  for (int column = 0; column < min(columns, tokens); ++column) {
    const Slot kept = locate_entry(state_indices, slots, first_entry + column, sequence, lane);
    if (lane == 0 && column + 1 != accepted.tokens) report_slot(kept, first_entry + column, op, errors);
  }
  if (lane != 0) return;
  report_accepted(accepted, num_accepted_tokens, slots, sequence, op, errors);
  if (columns > 0 && tokens > columns) {
    report_error(
        errors, op, "state_indices: expected a column for each token of a sequence, got fewer than ", tokens, sequence,
        __LINE__);
  }
}
