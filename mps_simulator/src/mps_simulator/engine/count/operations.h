// Counts a kernel's scalar operations by kind: exact counts of what clang's optimiser leaves of the shader.
//
// A detailed profile runs a program in which each basic block calls enter(); the block's operations are in a table.
// They count once for each entry of a thread, and as issued 32 times for the most entries of any lane between two
// points where its simdgroup is together, masked lanes included.
//
// An addition of a product that is used nowhere else is one fma. The simulator's own code (collective operations,
// matrix products, functions computed in double) does not count; a call of exp does. Integer operations leave out
// address arithmetic. bfloat is converted by integer operations, as on an M1 or M2; an M3 has instructions for it.
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
  // The lanes of the simdgroup are together now.
  void settle(uint32_t simdgroup);
  void settle_all();
  void add_to(KernelFigures& figures) const;

 private:
  struct Block {
    uint64_t interval = 0, turn = 0;
    uint32_t count = 0, most = 0, sum = 0;  // entries: of this lane, the most of a lane, of all lanes
  };
  struct Simdgroup {
    SimdgroupTurns turns;
    std::vector<Block> blocks;
    std::vector<uint32_t> entered;  // in this interval
  };
  struct Entries {
    uint64_t by_lanes = 0, by_simdgroups = 0;
  };

  std::array<Simdgroup, kMaxThreads / 32> simdgroups_;
  std::vector<Entries> entries_;
  std::span<const BlockOperations> blocks_;
};

}  // namespace simulator
