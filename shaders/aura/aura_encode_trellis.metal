// Encodes vectors with Viterbi's algorithm. A threadgroup is one simdgroup and owns 32 / kStates vectors. A lane owns
// one state of one vector. A window of 6 bits is state * 2^bits + choice. The choice is the value's own bits, and the
// state is shared with the next window. For each value in turn:
//     cost[state] = min over choices of cost_before[window % kStates] + (value - label[window])^2
// The first pass covers the values around the stream's joint and starts from any state, in order to find the state at
// the joint. The second pass covers all values, from that state back to itself. Registers hold a state's cost and the
// labels of its windows. Threadgroup memory holds the rotated directions, the choices of all states (4 bits each) and
// the codes. The layout is that of aura_encode.metal.
#include "aura/encode.h"

template <int bits, int D>
struct Trellis {
  enum { kChoices = 1 << bits };
  enum { kStates = entries_of(kTrellis + bits) / kChoices };
  enum { kVectors = trellis_vectors(bits) };
  static_assert(bits >= 2 && bits <= 4 && D % kHeldChoices == 0, "choices of 4 bits fill whole words");

  threadgroup const float* values;  // value d of a vector is values[d * kVectors]
  threadgroup uint* choices;        // of the lane's state
  float labels[kChoices];           // of the windows of the lane's state
  float cost;
  uint lane;

  METAL_FUNC int state() const { return int(lane) % kStates; }
  METAL_FUNC int first_lane() const { return int(lane) / kStates * kStates; }

  // Processes `steps` values from `first` on, around the ring, and keeps the choices.
  METAL_FUNC void forward(int first, int steps) {
    constexpr int kBefore = kChoices < kStates ? kChoices : kStates;  // states that precede a state
    uint held = 0;
    for (int i = 0; i < steps; ++i) {
      const int d = first + i < D ? first + i : first + i - D;
      const float value = values[d * kVectors];
      float before[kBefore];
      UNROLL for (int c = 0; c < kBefore; ++c) {
        before[c] = simd_shuffle(cost, ushort(first_lane() + (state() * kChoices + c) % kStates));
      }
      float least = INFINITY;
      uint choice = 0;
      UNROLL for (int c = 0; c < kChoices; ++c) {
        const float off = value - labels[c];
        const float cost_here = fma(off, off, before[c % kBefore]);
        if (cost_here < least) {
          least = cost_here;
          choice = uint(c);
        }
      }
      cost = least;
      held |= choice << uint(i % kHeldChoices * 4);
      if (i % kHeldChoices == kHeldChoices - 1) {
        choices[i / kHeldChoices * 32] = held;
        held = 0;
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }

  // Returns the vector's state with the least cost. Every lane must call.
  METAL_FUNC int best_state() const {
    float least = cost;
    int best = state();
    UNROLL for (ushort step = 1; step < kStates; step *= 2) {
      const float other_cost = simd_shuffle_xor(least, step);
      const int other = simd_shuffle_xor(best, step);
      const bool is_nearer = other_cost < least || (other_cost == least && other < best);
      least = is_nearer ? other_cost : least;
      best = is_nearer ? other : best;
    }
    return best;
  }

  // Returns the window of step i that leads to state `to`.
  METAL_FUNC int window_to(int to, int i) const {
    const uint held = choices[i / kHeldChoices * 32 + to - state()];
    return to * kChoices + int(held >> uint(i % kHeldChoices * 4) & uint(kChoices - 1));
  }

  METAL_FUNC int state_at_joint() {
    cost = 0.0f;
    forward(D - kReach, 2 * kReach);
    int result = best_state();
    for (int i = 2 * kReach - 1; i >= kReach; --i) result = window_to(result, i) % kStates;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    return result;
  }
};

template <typename T, int bits, int D>
[[kernel]] void aura_encode_trellis(
    device const T* x [[buffer(0)]],
    device const int* slots [[buffer(1)]],
    device const float* signs [[buffer(2)]],
    device const float* codebook [[buffer(3)]],
    device uint* codes [[buffer(4)]],
    device half* norms [[buffer(5)]],
    device const half* tile_means [[buffer(6)]],
    device ErrorLog* errors [[buffer(7)]],
    constant EncodeParameters& parameters [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_threadgroup]]) {
  typedef Trellis<bits, D> Code;
  constexpr int kVectors = Code::kVectors;
  constexpr int kStates = Code::kStates;
  constexpr int kLanes = lanes_of(D);
  constexpr int kWords = words_of(D, bits);
  constexpr int kEntries = entries_of(kTrellis + bits);
  threadgroup float table[kEntries];
  threadgroup float directions[D * kVectors];
  threadgroup uint choices[D / kHeldChoices * 32];
  threadgroup uchar code_bytes[kVectors * D];
  threadgroup Length lengths[kVectors];
  threadgroup int slot_of_vector[kVectors];
  stage_table(table, codebook, kEntries, lane, 32);

  const int64_t first = int64_t(group.x) * kVectors;
  for (int next = 0; next < kVectors; next += 32 / kLanes) {
    const int vector = next + int(lane) / kLanes;
    const VectorPlace place = place_of_vector(parameters.vectors, first + vector);
    float values[D / kLanes];
    read_vector<D>(values, x, tile_means, parameters, place, slot_of(slots, parameters, place), lane);
    const Length length = find_direction<D>(values, signs, lane);
    const bool is_own = vector < kVectors;
    if (is_own && int(lane) % kLanes == 0) lengths[vector] = length;
    UNROLL for (int i = 0; i < D / kLanes; ++i) {
      if (is_own) directions[place_of<D>(i, lane) * kVectors + vector] = isfinite(length.norm) ? values[i] : 0.0f;
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  Code code;
  code.lane = lane;
  code.choices = choices + lane;
  const int vector = int(lane) / kStates;
  code.values = directions + vector;
  UNROLL for (int c = 0; c < Code::kChoices; ++c) code.labels[c] = table[code.state() * Code::kChoices + c];
  int state = code.state_at_joint();
  code.cost = code.state() == state ? 0.0f : INFINITY;
  code.forward(0, D);

  const bool is_first = code.state() == 0;
  const Length length = lengths[vector];
  float kept = 0.0f;
  for (int d = D - 1; d >= 0; --d) {
    const int window = isfinite(length.norm) ? code.window_to(state, d) : 0;
    kept = fma(table[window], table[window], kept);
    if (is_first) code_bytes[vector * D + d] = uchar(window % Code::kChoices);
    state = window % kStates;
  }
  const VectorPlace place = place_of_vector(parameters.vectors, first + vector);
  const int slot = checked_slot(slot_of(slots, parameters, place), errors, parameters, place, is_first);
  if (is_first) {
    slot_of_vector[vector] = slot;
    if (slot >= 0) {
      norms[offset_of(parameters.norms, place.batch, place.head, slot)] = half(length.norm / sqrt(kept) * length.grow);
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  for (int i = int(lane); i < kVectors * kWords; i += 32) {
    const int other = i / kWords;
    const VectorPlace at = place_of_vector(parameters.vectors, first + other);
    if (slot_of_vector[other] >= 0) {
      device uint* target = codes + offset_of(parameters.codes, at.batch, at.head, slot_of_vector[other]);
      target[i % kWords] = packed_word<D, bits, true>(code_bytes + other * D, i % kWords);
    }
  }
}
