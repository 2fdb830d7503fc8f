// Combines the accesses of lanes into accesses of simdgroups, for the figures of a detailed profile.
//
// A simdgroup is together at a collective operation and at a barrier. We assume that the n-th time a lane runs an
// instruction after such a point is the n-th time for the other lanes too, as on a GPU. There is one exception: if
// lanes run an inner loop for different numbers of iterations, a GPU makes more and smaller accesses. Instructions are
// those of clang's code. A vector of up to 16 bytes is one access, a packed vector is one access per element, and an
// atomic_fetch_* is two accesses.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "mps_simulator/engine/engine.h"
#include "mps_simulator/engine/watch/layout.h"
#include "simdgroup_turns.h"

namespace simulator {

struct LaneAccess {
  const void* site;  // the instruction
  uintptr_t address;
  size_t size;
  bool reads, writes;
};

class SimdgroupAccesses {
 public:
  void begin_dispatch() { figures_ = {}; }
  void add(uint32_t thread, const Segment& segment, const LaneAccess& access);
  // Call this when the lanes of the simdgroup are together: their accesses until now are complete. If each lane then
  // reads or writes two elements for a simdgroup_load or simdgroup_store, these are one access to the 8x8 matrix.
  void meet(uint32_t simdgroup, const char* operation, const void* site);
  void settle_all();
  const KernelFigures& figures() const { return figures_; }

 private:
  static constexpr size_t kMaxParts = 64;  // two per lane of a matrix
  struct Part {
    uint64_t address : 56, size : 8;
  };
  struct Access {
    const Segment* segment;
    bool reads, writes;
    uint32_t part_count;
    std::array<Part, kMaxParts> parts;
  };
  struct Site {
    uint64_t interval = 0, turn = 0;  // a turn is one lane's run within the interval
    uint32_t count = 0;               // number of accesses of that lane
    std::vector<uint32_t> accesses;   // index n has the n-th access of any lane
  };
  struct Simdgroup {
    SimdgroupTurns turns;
    const void* matrix = nullptr;  // the site of a simdgroup_load or _store that has begun
    uint32_t matrix_parts = 0;     // parts of the matrix that this lane has accessed
    std::unordered_map<uintptr_t, Site> sites;
    std::vector<Access> accesses;
    bool has_loaded = false;  // whether it has loaded from device memory since the last barrier of the threadgroup
  };

  Access& access_of(Simdgroup& simdgroup, Site& site, uint32_t number, const Segment& segment,
                    const LaneAccess& access);
  void settle(Simdgroup& simdgroup);
  void count_device(const Access& access);
  void count_threadgroup(const Access& access);

  std::array<Simdgroup, kMaxThreads / 32> simdgroups_;
  KernelFigures figures_;
};

}  // namespace simulator
