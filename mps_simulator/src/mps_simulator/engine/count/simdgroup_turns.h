// Divides the time of a simdgroup. An interval lies between two points where its lanes are together. In an interval
// each lane runs once, alone; this is a turn.
#pragma once
#include <cstdint>

namespace simulator {

struct SimdgroupTurns {
  uint64_t interval = 1, turn = 0;
  uint32_t lane = 32;  // the lane that runs; 32 before the first

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
