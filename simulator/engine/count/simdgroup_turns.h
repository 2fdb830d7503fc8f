// Time within a simdgroup. An interval lies between two points where its lanes are together; in it each lane has one
// turn, in which it runs alone.
#pragma once
#include <cstdint>

namespace simulator {

struct SimdgroupTurns {
  uint64_t interval = 1, turn = 0;
  uint32_t lane = 32;  // whose turn it is; 32: nobody's yet

  // True where the turn begins.
  bool run(uint32_t next) {
    if (lane == next) return false;
    lane = next;
    ++turn;
    return true;
  }
  void end_interval() {
    lane = 32;
    ++interval;
  }
};

}  // namespace simulator
