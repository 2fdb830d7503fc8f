// Counts a kernel's scalar operations by kind. The counts are exact for the code that clang's optimiser leaves of the
// shader.
//
// A detailed profile runs a program in which each basic block calls enter(); a table holds the block's operations.
// There are two counts. `operations` counts a block once each time that a thread enters it. `operations_issued` takes
// the largest number of entries of any lane between two points where its simdgroup is together, and counts these
// entries 32 times, so it includes masked lanes.
//
// An addition is counted as an fma if one operand is a product that is used nowhere else. The simulator's own code
// (collective operations, matrix products, functions computed in double) does not count, but a call of exp does.
// Integer operations do not include address arithmetic. bfloat is converted by integer operations, as on an M1 or M2;
// an M3 has instructions for it.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "mps_simulator/engine/engine.h"
#include "simdgroup_turns.h"

namespace simulator {

class OperationCounts {
 public:
  void begin_dispatch(std::span<const BlockOperations> blocks);
  void enter(uint32_t thread, uint32_t block);
  // Call this when the lanes of the simdgroup are together.
  void settle(uint32_t simdgroup);
  void settle_all();
  void add_to(KernelFigures& figures) const;

 private:
  struct Block {
    uint64_t interval = 0, turn = 0;
    uint32_t count = 0, most = 0, sum = 0;  // entries of this lane, largest number of a lane, and sum of all lanes
  };
  struct Simdgroup {
    SimdgroupTurns turns;
    std::vector<Block> blocks;
    std::vector<uint32_t> entered;  // blocks entered in this interval
  };
  struct Entries {
    uint64_t by_lanes = 0, by_simdgroups = 0;
  };

  std::array<Simdgroup, kMaxThreads / 32> simdgroups_;
  std::vector<Entries> entries_;
  std::span<const BlockOperations> blocks_;
};

}  // namespace simulator
