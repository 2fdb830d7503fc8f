// Checks every load and store of a kernel. Each worker has one watch.
//
// Accesses to the fiber's own stack pass. The watch first tries the segment that the same instruction used last time,
// because an instruction nearly always stays within one argument. It then checks the alignment, the written bits, and
// the cells of shadow.h.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "layout.h"
#include "mps_simulator/engine/count/operations.h"
#include "mps_simulator/engine/count/simdgroup_access.h"
#include "mps_simulator/engine/engine.h"
#include "mps_simulator/engine/run/fibers.h"
#include "mps_simulator/engine/run/threadgroup_memory.h"
#include "shadow.h"

namespace simulator {

class Worker;
struct Job;

enum class Action : uint8_t { read, write, atomic_load, atomic_store, atomic_update };
constexpr bool reads(Action action) {
  return action == Action::read || action == Action::atomic_load || action == Action::atomic_update;
}
constexpr bool writes(Action action) { return action != Action::read && action != Action::atomic_load; }
constexpr bool is_atomic(Action action) { return action >= Action::atomic_load; }

struct Access {
  Action action;
  uintptr_t address;
  size_t size;
};

// The other access of a race within a threadgroup.
struct Rival {
  Action action = Action::read;
  uint32_t thread = 0;
  bool is_known = true;  // false if the cell no longer says which of several readers it was
};

class Watch {
 public:
  explicit Watch(Worker& worker);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void begin_dispatch(const Job& job, const FiberPool& fibers);
  void end_dispatch(KernelFigures& figures);
  void add_threadgroup_array(const ThreadgroupArray& array);
  void begin_threadgroup(uint64_t index);
  void set_thread(uint32_t thread) { thread_ = thread; }
  void threadgroup_barrier(uint32_t scope);
  void simdgroup_barrier(uint32_t simdgroup, uint32_t scope);
  // Call this when the lanes of the simdgroup meet at an operation or at a barrier of the simdgroup.
  void simdgroup_together(uint32_t simdgroup, const char* operation, const void* site) {
    if (is_detailed_) [[unlikely]]
      settle(simdgroup, operation, site);
  }
  void end_threadgroup() {
    if (is_detailed_) settle_all();
  }
  void enter_block(uint32_t block) {
    if (is_detailed_) operations_.enter(thread_, block);
  }

  // `size` is at most 16. `is_natural` says that the alignment of the type is its size. `site` is the instruction.
  template <Action action>
  void access(uintptr_t address, size_t size, bool is_natural, const void* site);
  template <Action action>
  void access_range(uintptr_t address, size_t size, const void* site);

 private:
  enum Space : uint8_t { device_space, threadgroup_space };
  static constexpr size_t kSites = 256;

  Segment* find(uintptr_t address, size_t size);
  template <Action action>
  [[gnu::noinline]] void access_elsewhere(uintptr_t address, size_t size, const void* site);
  template <Action action>
  void access_segment(Segment& segment, uintptr_t address, size_t size, const void* site);
  template <Action action>
  void order(const Segment& segment, uintptr_t address, size_t size);
  template <Action action>
  void order_shared(const Segment& segment, uintptr_t address, size_t size);
  template <Action action>
  [[gnu::noinline]] void order_bytes(const Segment& segment, uintptr_t address, size_t size);
  template <Action action>
  [[gnu::noinline]] void order_shared_bytes(const Segment& segment, uintptr_t address, size_t size);
  bool is_noted(uint64_t word, Space space) const;
  template <Action action>
  bool step(uint64_t& word, Space space);
  enum class Step : uint8_t { done, conflict, split };
  template <Action action>
  Step step_shared(SharedCell& cell);
  bool replace(std::atomic<uint64_t>& word, uint64_t& expected, uint64_t wanted) const {
    if (!is_alone_) return word.compare_exchange_strong(expected, wanted, std::memory_order_relaxed);
    word.store(wanted, std::memory_order_relaxed);
    return true;
  }
  void split(uint64_t& word, uint64_t* bytes, size_t count);
  void split_shared(SharedCell& cell, SharedCell* bytes, size_t count);
  void advance();
  void settle(uint32_t simdgroup, const char* operation, const void* site);
  void settle_all();

  [[noreturn, gnu::noinline, gnu::cold]] void fail_outside(const Access& access);
  [[noreturn, gnu::noinline, gnu::cold]] void fail_misaligned(const Access& access);
  [[noreturn, gnu::noinline, gnu::cold]] void fail_not_writable(const Access& access);
  [[noreturn, gnu::noinline, gnu::cold]] void fail_unwritten(const Access& access);
  [[noreturn, gnu::noinline, gnu::cold]] void fail_race(const Access& access, const Segment& segment, uint64_t word);
  [[noreturn, gnu::noinline, gnu::cold]] void fail_shared_race(const Access& access, const Segment& segment,
                                                               const SharedCell& cell);
  Rival rival_of(const Access& access, uint64_t word, Space space) const;
  struct Place;
  Place place_of(const Access& access) const;
  std::string here() const;
  [[noreturn]] void fail(const std::string& what);

  uintptr_t private_start_ = 0;
  size_t private_length_ = 0;
  uint32_t thread_ = 0;
  uint32_t tick_ = 1;
  uint32_t ordered_[2] = {};  // the tick of the last threadgroup barrier, for each space
  uint32_t simdgroup_ordered_[kMaxThreads / 32][2] = {};
  uint32_t run_ = 0, first_run_ = 0;  // run of this threadgroup, and first run of this dispatch; see SharedCell
  bool keeps_order_ = true;           // false in a threadgroup that has used all ticks
  bool is_alone_ = true;              // no other worker uses the shared cells
  std::array<Segment*, kSites> last_at_;
  uint64_t bytes_[4][2] = {};  // indexed by kind of segment, and by read or write
  bool is_detailed_ = false;   // the next two are used only if it is true
  SimdgroupAccesses accesses_;
  OperationCounts operations_;

  Worker& worker_;
  const Job* job_ = nullptr;
  Segment nowhere_;
  std::vector<Segment> segments_;
  struct ArrayRecord {
    ThreadgroupArray array;
    ByteBits written{kMaxThreadgroupMemory};
  };
  std::vector<std::unique_ptr<ArrayRecord>> arrays_;  // the first array_count_ records belong to this dispatch
  size_t array_count_ = 0;
  uint64_t* cells_;
};

// The watch of the threadgroup that runs on this operating-system thread, or null without watch.
extern constinit thread_local Watch* current_watch __attribute__((tls_model("initial-exec")));

}  // namespace simulator
