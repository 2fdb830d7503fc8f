// <metal_simdgroup>: reductions, scans, shuffles and votes of the 32 lanes of a simdgroup.
#pragma once

namespace simulator {

template <typename T>
struct is_lane_value {
  static constexpr bool value = is_number<T>::value && !__is_same(T, bool) && !__is_same(T, bfloat) && sizeof(T) <= 4;
};
template <typename T, int N>
struct is_lane_value<metal::vec<T, N>> : is_lane_value<T> {};

template <typename T>
struct is_integral_value : is_integer<T> {};
template <typename T, int N>
struct is_integral_value<metal::vec<T, N>> : is_integer<T> {};

template <typename T>
struct value_slot {
  T value, filling;
  ushort operand, modulo;
};

struct add {
  template <typename T>
  METAL_FUNC static T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
};
struct multiply {
  template <typename T>
  METAL_FUNC static T apply(T a, T b) {
    return static_cast<T>(a * b);
  }
};
struct least {
  template <typename T>
  METAL_FUNC static T apply(T a, T b) {
    return metal::min(a, b);
  }
};
struct greatest {
  template <typename T>
  METAL_FUNC static T apply(T a, T b) {
    return metal::max(a, b);
  }
};
struct bit_and {
  template <typename T>
  METAL_FUNC static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct bit_or {
  template <typename T>
  METAL_FUNC static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct bit_xor {
  template <typename T>
  METAL_FUNC static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

template <typename T>
METAL_FUNC value_slot<T>* slot_of(void* const* slots, uint lane) {
  return static_cast<value_slot<T>*>(slots[lane]);
}

// Adds neighbours first, then pairs of pairs, like a reduction by simd_shuffle_xor. Metal does not specify the order,
// and the perturbing mode shuffles it.
template <typename T, typename Operation, uint width>
SIMULATOR_UNWATCHED inline void reduce(void* const slots[32]) {
  const uint8_t* order = simulator_reduction_order();
  for (uint base = 0; base < 32; base += width) {
    T values[width];
    uint count = 0;
    for (uint i = 0; i < 32; ++i) {
      uint lane = order[i];
      if (lane >= base && lane < base + width && slots[lane]) values[count++] = slot_of<T>(slots, lane)->value;
    }
    if (count == 0) continue;
    for (uint stride = 1; stride < count; stride *= 2) {
      for (uint i = 0; i + stride < count; i += 2 * stride) values[i] = Operation::apply(values[i], values[i + stride]);
    }
    for (uint lane = base; lane < base + width; ++lane) {
      if (slots[lane]) slot_of<T>(slots, lane)->value = values[0];
    }
  }
}

// Goes through the lanes in order. For each lane, the perturbing mode adds the lanes up to it in its own order.
template <typename T, typename Operation, bool inclusive, uint width>
SIMULATOR_UNWATCHED inline void scan(void* const slots[32]) {
  const uint8_t* order = simulator_reduction_order();
  T values[32];
  for (uint lane = 0; lane < 32; ++lane) values[lane] = slots[lane] ? slot_of<T>(slots, lane)->value : undefined<T>();
  for (uint lane = 0; lane < 32; ++lane) {
    if (!slots[lane]) continue;
    const uint base = lane / width * width, last = lane + (inclusive ? 1 : 0);
    T total = __is_same(Operation, multiply) ? T(1) : T(0);
    for (uint i = 0; i < 32; ++i) {
      const uint from = order[i];
      if (from >= base && from < last && slots[from]) total = Operation::apply(total, values[from]);
    }
    slot_of<T>(slots, lane)->value = total;
  }
}

// Gives each lane the value of another lane. Source::lane returns the index of that lane; a negative index means the
// filling.
template <typename T, typename Source, uint width>
SIMULATOR_UNWATCHED inline void exchange(void* const slots[32]) {
  T values[32];
  for (uint lane = 0; lane < 32; ++lane) values[lane] = slots[lane] ? slot_of<T>(slots, lane)->value : undefined<T>();
  for (uint lane = 0; lane < 32; ++lane) {
    if (!slots[lane]) continue;
    value_slot<T>* slot = slot_of<T>(slots, lane);
    uint base = lane / width * width;
    int source = Source::lane(static_cast<int>(lane - base), slot->operand, static_cast<int>(width));
    slot->value = source >= static_cast<int>(width) ? undefined<T>()
                  : source < 0                      ? slot->filling
                                                    : values[base + source];
  }
}

struct from_lane {
  METAL_FUNC static int lane(int, int operand, int) { return operand; }
};
struct from_first {
  METAL_FUNC static int lane(int, int, int) { return 0; }
};
struct from_xor {
  METAL_FUNC static int lane(int own, int operand, int) { return own ^ operand; }
};
// A shuffle up or down does not wrap. A lane without a source keeps its own value, which is the filling here.
struct from_below {
  METAL_FUNC static int lane(int own, int operand, int) { return own - operand; }
};
struct from_above {
  METAL_FUNC static int lane(int own, int operand, int width) { return own + operand < width ? own + operand : -1; }
};
struct from_below_around {
  METAL_FUNC static int lane(int own, int operand, int width) { return (own - operand) & (width - 1); }
};
struct from_above_around {
  METAL_FUNC static int lane(int own, int operand, int width) { return (own + operand) & (width - 1); }
};

// In shuffle_and_fill, a lane without a source takes a value of `filling`, as if the filling continued the data.
template <typename T, bool up, uint width>
SIMULATOR_UNWATCHED inline void exchange_and_fill(void* const slots[32]) {
  T values[32], fillings[32];
  for (uint lane = 0; lane < 32; ++lane) {
    values[lane] = slots[lane] ? slot_of<T>(slots, lane)->value : undefined<T>();
    fillings[lane] = slots[lane] ? slot_of<T>(slots, lane)->filling : undefined<T>();
  }
  for (uint lane = 0; lane < 32; ++lane) {
    if (!slots[lane]) continue;
    value_slot<T>* slot = slot_of<T>(slots, lane);
    int modulo = slot->modulo, first = static_cast<int>(lane) / modulo * modulo, own = static_cast<int>(lane) - first;
    int source = up ? own - slot->operand : own + slot->operand;
    bool inside = source >= 0 && source < modulo;
    slot->value = inside ? values[first + source] : fillings[first + (source + modulo) % modulo];
  }
}

// One lane's part in an operation on values.
template <typename T>
SIMULATOR_UNWATCHED inline T combined(const char* operation, simulator_combine combine, T value, T filling = T(),
                                      ushort operand = 0, ushort modulo = 32) {
  value_slot<T> slot = {value, filling, operand, modulo};
  simulator_collective(operation, SIMULATOR_SITE, &slot, combine);
  return slot.value;
}

struct vote_slot {
  ulong result;
  bool vote;
};
template <uint width>
SIMULATOR_UNWATCHED inline void count_votes(void* const slots[32]) {
  for (uint base = 0; base < 32; base += width) {
    ulong mask = 0;
    for (uint i = 0; i < width; ++i) {
      if (slots[base + i] && static_cast<vote_slot*>(slots[base + i])->vote) mask |= 1ul << i;
    }
    for (uint i = 0; i < width; ++i) {
      if (slots[base + i]) static_cast<vote_slot*>(slots[base + i])->result = mask;
    }
  }
}
SIMULATOR_UNWATCHED inline ulong ballot(const char* operation, bool vote, simulator_combine combine) {
  vote_slot slot = {0, vote};
  simulator_collective(operation, SIMULATOR_SITE, &slot, combine);
  return slot.result;
}

}  // namespace simulator

namespace metal {

#define SIMULATOR_LANES template <typename T, typename = enable_if_t<simulator::is_lane_value<T>::value>>
#define SIMULATOR_REDUCTION(group, width, name, Operation)                                                          \
  SIMULATOR_LANES METAL_FUNC T group##_##name(T data) {                                                             \
    return simulator::combined(SIMULATOR_NAME(#group "_" #name), simulator::reduce<T, simulator::Operation, width>, \
                               data);                                                                               \
  }
#define SIMULATOR_BITWISE(group, width, name, Operation)                                                            \
  template <typename T,                                                                                             \
            typename = enable_if_t<simulator::is_lane_value<T>::value && simulator::is_integral_value<T>::value>>   \
  METAL_FUNC T group##_##name(T data) {                                                                             \
    return simulator::combined(SIMULATOR_NAME(#group "_" #name), simulator::reduce<T, simulator::Operation, width>, \
                               data);                                                                               \
  }
#define SIMULATOR_SCAN(group, width, name, Operation, inclusive)                                  \
  SIMULATOR_LANES METAL_FUNC T group##_##name(T data) {                                           \
    return simulator::combined(SIMULATOR_NAME(#group "_" #name),                                  \
                               simulator::scan<T, simulator::Operation, inclusive, width>, data); \
  }
#define SIMULATOR_SHUFFLE(group, width, name, Source, parameter)                                                   \
  SIMULATOR_LANES METAL_FUNC T group##_##name(T data, ushort parameter) {                                          \
    return simulator::combined(SIMULATOR_NAME(#group "_" #name), simulator::exchange<T, simulator::Source, width>, \
                               data, data, parameter, width);                                                      \
  }
#define SIMULATOR_FILL(group, width, name, up)                                                                     \
  SIMULATOR_LANES METAL_FUNC T group##_##name(T data, T filling, ushort delta, ushort modulo = width) {            \
    return simulator::combined(SIMULATOR_NAME(#group "_" #name), simulator::exchange_and_fill<T, up, width>, data, \
                               filling, delta, modulo);                                                            \
  }
#define SIMULATOR_GROUP(group, width)                                                                           \
  SIMULATOR_REDUCTION(group, width, sum, add)                                                                   \
  SIMULATOR_REDUCTION(group, width, product, multiply)                                                          \
  SIMULATOR_REDUCTION(group, width, min, least)                                                                 \
  SIMULATOR_REDUCTION(group, width, max, greatest)                                                              \
  SIMULATOR_BITWISE(group, width, and, bit_and)                                                                 \
  SIMULATOR_BITWISE(group, width, or, bit_or)                                                                   \
  SIMULATOR_BITWISE(group, width, xor, bit_xor)                                                                 \
  SIMULATOR_SCAN(group, width, prefix_inclusive_sum, add, true)                                                 \
  SIMULATOR_SCAN(group, width, prefix_exclusive_sum, add, false)                                                \
  SIMULATOR_SCAN(group, width, prefix_inclusive_product, multiply, true)                                        \
  SIMULATOR_SCAN(group, width, prefix_exclusive_product, multiply, false)                                       \
  SIMULATOR_SHUFFLE(group, width, broadcast, from_lane, broadcast_lane_id)                                      \
  SIMULATOR_SHUFFLE(group, width, shuffle, from_lane, lane_id)                                                  \
  SIMULATOR_SHUFFLE(group, width, shuffle_xor, from_xor, mask)                                                  \
  SIMULATOR_SHUFFLE(group, width, shuffle_up, from_below, delta)                                                \
  SIMULATOR_SHUFFLE(group, width, shuffle_down, from_above, delta)                                              \
  SIMULATOR_SHUFFLE(group, width, shuffle_rotate_up, from_below_around, delta)                                  \
  SIMULATOR_SHUFFLE(group, width, shuffle_rotate_down, from_above_around, delta)                                \
  SIMULATOR_FILL(group, width, shuffle_and_fill_up, true)                                                       \
  SIMULATOR_FILL(group, width, shuffle_and_fill_down, false)                                                    \
  SIMULATOR_LANES METAL_FUNC T group##_broadcast_first(T data) {                                                \
    return simulator::combined(SIMULATOR_NAME(#group "_broadcast_first"),                                       \
                               simulator::exchange<T, simulator::from_first, width>, data, data, 0, width);     \
  }                                                                                                             \
  struct group##_vote {                                                                                         \
    typedef ulong vote_t;                                                                                       \
    METAL_FUNC explicit constexpr group##_vote(vote_t bits = 0) : bits_(bits) {}                                \
    METAL_FUNC explicit constexpr operator vote_t() const { return bits_; }                                     \
    METAL_FUNC constexpr bool all() const { return bits_ == (1ul << width) - 1; }                               \
    METAL_FUNC constexpr bool any() const { return bits_ != 0; }                                                \
                                                                                                                \
   private:                                                                                                     \
    vote_t bits_;                                                                                               \
  };                                                                                                            \
  METAL_FUNC group##_vote group##_ballot(bool expression) {                                                     \
    return group##_vote(                                                                                        \
        simulator::ballot(SIMULATOR_NAME(#group "_ballot"), expression, simulator::count_votes<width>));        \
  }                                                                                                             \
  METAL_FUNC group##_vote group##_active_threads_mask() {                                                       \
    return group##_vote(                                                                                        \
        simulator::ballot(SIMULATOR_NAME(#group "_active_threads_mask"), true, simulator::count_votes<width>)); \
  }                                                                                                             \
  METAL_FUNC bool group##_any(bool expression) {                                                                \
    return simulator::ballot(SIMULATOR_NAME(#group "_any"), expression, simulator::count_votes<width>) != 0;    \
  }                                                                                                             \
  METAL_FUNC bool group##_all(bool expression) {                                                                \
    return simulator::ballot(SIMULATOR_NAME(#group "_all"), !expression, simulator::count_votes<width>) == 0;   \
  }                                                                                                             \
  METAL_FUNC bool group##_is_first() {                                                                          \
    return simulator::meet_all_lanes(SIMULATOR_NAME(#group "_is_first")) % width == 0;                          \
  }                                                                                                             \
  METAL_FUNC bool group##_is_helper_thread() { return false; }

SIMULATOR_GROUP(simd, 32)
SIMULATOR_GROUP(quad, 4)

#undef SIMULATOR_LANES
#undef SIMULATOR_REDUCTION
#undef SIMULATOR_BITWISE
#undef SIMULATOR_SCAN
#undef SIMULATOR_SHUFFLE
#undef SIMULATOR_FILL
#undef SIMULATOR_GROUP

}  // namespace metal
