// Viterbi's algorithm for one ISA variant. Each lane has one row. A window is state * 2^bits + choice. The choice
// is the value's own bits, and the state is shared with the next window. The low bits of a window are the state before
// it.

template <int kBits>
struct Trellis {
  static constexpr int kChoices = 1 << kBits, kStates = 1 << (kWindowBits - kBits);
  Floats costs[kStates];  // the least squared error of the values so far, for each state that they can end in
  const TrellisRows& rows;

  // Steps over `steps` values of the ring from `first` on, and stores the choice of each state.
  TORCH_GDN_INLINE void forward(int64_t first, int64_t steps) {
    Words held[kStates] = {};
    for (int64_t i = 0; i < steps; ++i) {
      const int64_t d = first + i < rows.D ? first + i : first + i - rows.D;
      const Floats x = load(rows.x + d * kLanes);
      const int shift = static_cast<int>(i % kHeldChoices) * 4;
      Floats next[kStates];
#pragma GCC unroll 16
      for (int state = 0; state < kStates; ++state) {
        Floats least;
        Words choice = {};
#pragma GCC unroll 16
        for (int c = 0; c < kChoices; ++c) {
          const int window = state * kChoices + c;
          const Floats off = x - rows.labels[window], cost = costs[window % kStates] + off * off;
          if (c == 0) {
            least = cost;
            continue;
          }
          choice = cost < least ? Words{} + c : choice;
          least = cost < least ? cost : least;
        }
        next[state] = least;
        held[state] |= choice << shift;
      }
#pragma GCC unroll 16
      for (int state = 0; state < kStates; ++state) costs[state] = next[state];
      if (i % kHeldChoices != kHeldChoices - 1) continue;
#pragma GCC unroll 16
      for (int state = 0; state < kStates; ++state) {
        store(rows.choices + (i / kHeldChoices * kStates + state) * kLanes, held[state]);
        held[state] = Words{};
      }
    }
  }

  // Goes back from `states` over steps [first, last). Leaves the states before these steps in `states`.
  TORCH_GDN_INLINE void backward(int32_t* states, int64_t first, int64_t last, uint8_t* windows) const {
    for (int64_t i = last - 1; i >= first; --i) {
      const uint32_t* word = rows.choices + i / kHeldChoices * kStates * kLanes;
      const int shift = static_cast<int>(i % kHeldChoices) * 4;
      for (int lane = 0; lane < kLanes; ++lane) {
        const auto choice = static_cast<int32_t>(word[states[lane] * kLanes + lane] >> shift) & (kChoices - 1);
        const int32_t window = states[lane] * kChoices + choice;
        windows[i * kLanes + lane] = static_cast<uint8_t>(window);
        states[lane] = window % kStates;
      }
    }
  }

  // Returns each lane's state with the least cost.
  TORCH_GDN_INLINE void best_states(int32_t* states) const {
    Floats least = costs[0];
    Integers best = {};
    for (int state = 1; state < kStates; ++state) {
      best = costs[state] < least ? Integers{} + state : best;
      least = costs[state] < least ? costs[state] : least;
    }
    __builtin_memcpy(states, &best, sizeof(best));
  }

  TORCH_GDN_INLINE void begin_in(const int32_t* states) {
    Integers begin;
    __builtin_memcpy(&begin, states, sizeof(begin));
    for (int state = 0; state < kStates; ++state) {
      costs[state] = begin == state ? Floats{} : all_lanes(__builtin_inff());
    }
  }

  // A first pass around the joint finds the state there. A second pass over all values begins and ends in that state.
  TORCH_GDN_INLINE void find() {
    alignas(64) int32_t states[kLanes];
    for (Floats& cost : costs) cost = Floats{};
    forward(rows.D - kReach, 2 * kReach);
    best_states(states);
    backward(states, kReach, 2 * kReach, rows.windows);
    begin_in(states);
    forward(0, rows.D);
    backward(states, 0, rows.D, rows.windows);
  }
};

void nearest_windows(const TrellisRows& rows) {
  if (rows.bits == 2) return Trellis<2>{{}, rows}.find();
  if (rows.bits == 3) return Trellis<3>{{}, rows}.find();
  Trellis<4>{{}, rows}.find();
}
