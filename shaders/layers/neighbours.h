// Moves 32 * Count vectors of a simdgroup that are neighbours in device memory. Each lane owns Count of them. The lanes
// move the vectors together, as whole cache lines, and exchange them by shuffles. If each lane loaded its own vectors,
// it would touch each line Count times. Every lane of the simdgroup must call this. Vectors from `available` on are not
// touched. A lane stores to the addresses that it loaded from, so one tensor may be source and target without a
// barrier.
#pragma once
#include "core/vectors.h"

GDN_CONSTANT int kLanes = 32;

template <int Width>
METAL_FUNC Values<Width> from_lane(Values<Width> values, int lane) {
  UNROLL for (int i = 0; i < Width; ++i) values.at[i] = simd_shuffle(values.at[i], ushort(lane));
  return values;
}

// own[i] is vector Count * lane + i, or zeros if there is no such vector.
template <int Count, int Width, typename T>
METAL_FUNC void load_neighbours(device const T* first, int available, int lane, thread Values<Width>* own) {
  Values<Width> lines[Count];
  UNROLL for (int line = 0; line < Count; ++line) {
    const int at = line * kLanes + lane;
    lines[line] = no_values<Width>();
    if (at < available) lines[line] = load_values<Width>(first + at * Width);
  }
  UNROLL for (int i = 0; i < Count; ++i) {
    const int at = Count * lane + i;
    UNROLL for (int line = 0; line < Count; ++line) {
      const Values<Width> neighbour = from_lane(lines[line], at % kLanes);
      if (line == 0 || line == at / kLanes) own[i] = neighbour;
    }
  }
}

template <int Count, int Width, typename T>
METAL_FUNC void store_neighbours(device T* first, int available, int lane, thread const Values<Width>* own) {
  UNROLL for (int line = 0; line < Count; ++line) {
    const int at = line * kLanes + lane;
    Values<Width> values = no_values<Width>();
    UNROLL for (int i = 0; i < Count; ++i) {
      const Values<Width> neighbour = from_lane(own[i], at / Count);
      if (i == at % Count) values = neighbour;
    }
    if (at < available) store_values(first + at * Width, values);
  }
}
