// Time within a simdgroup. Between two points where its lanes are together (an interval), each lane runs once, alone (a
// turn).
#pragma once
#include <cstdint>

namespace simulator {

struct SimdgroupTurns {
  uint64_t interval = 1, turn = 0;
  uint32_t lane = 32;  // the lane that runs; 32: none yet

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
