// The scalar operations of a kernel, by kind: exact counts of what clang's optimiser left of the shader.
//
// A detailed profile runs a twin of the program. On its way from LLVM's intermediate code to the processor's, each
// basic block gets a call that says that a thread enters it, and its operations are counted once, in a table. A block's
// operations times its entries are what the threads did; times the most entries of any lane between two points where
// its simdgroup is together, and times 32, they are what a GPU issues, masked lanes included.
//
// An addition whose operand is a product that nobody else uses is one fma, as contraction makes it. The simulator's own
// code (collective operations, matrix products, functions computed in double) does not count; a call of exp does.
// Integer operations are those that clang left, without the forming of addresses: Apple's compiler may need others. The
// simulator's bfloat is converted by integer operations, as on an M1 or M2; an M3 has instructions for it.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine.h"
#include "simdgroup_turns.h"

namespace simulator {

// The intermediate code with a call in each block of the shader, and with the table of what the blocks hold.
std::string with_counters(const std::string& intermediate_code);

class OperationCounts {
 public:
  void begin_dispatch(std::span<const BlockOperations> blocks);
  void enter(uint32_t thread, uint32_t block);
  // The lanes of the simdgroup are together.
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
