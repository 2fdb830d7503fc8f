// A record for each unit of memory. It is used to find data races.
//
// Time within a threadgroup is counted in ticks. Each barrier of the threadgroup or of one of its simdgroups is a tick.
// Two accesses of one threadgroup are ordered in three cases: one thread made both; the earlier access's tick is not
// after the last threadgroup barrier; or one simdgroup made both, and the earlier access's tick is not after that
// simdgroup's last barrier.
//
// A cell stores the last writer. It also stores who has read since: one thread, several threads of one simdgroup, or
// several simdgroups. This is enough to check the next write exactly.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace simulator {

constexpr uint32_t kTickLimit = 1u << 20;

struct Cell {
  enum Readers : uint8_t { one, several, many_simdgroups, split };  // split: see the cells of the single bytes

  Readers readers = one;
  bool written_atomically = false;
  uint32_t reader = 0, writer = 0;         // threads; if no write is remembered, `writer` is the previous reader
  uint32_t read_tick = 0, write_tick = 0;  // 0 means never

  static Cell unpack(uint64_t word) {
    return {Readers(word & 3),
            bool(word >> 2 & 1),
            uint32_t(word >> 3 & 1023),
            uint32_t(word >> 13 & 1023),
            uint32_t(word >> 23 & 0xFFFFF),
            uint32_t(word >> 43)};
  }
  uint64_t pack() const {
    return uint64_t{readers} | uint64_t{written_atomically} << 2 | uint64_t{reader} << 3 | uint64_t{writer} << 13 |
           uint64_t{read_tick} << 23 | uint64_t{write_tick} << 43;
  }
};

// The record for a unit of device memory. It says which threadgroups used it, and has the threadgroup's cell if there
// is only one. Several threadgroups may only read (or all use atomics), so they need no cell. Threadgroups are numbered
// through all dispatches; such a number is called a run. A cell with an older run is empty, so nothing is ever cleared.
struct SharedCell {
  enum Flags : uint64_t { read = 1, write = 2, atomic = 4, many = 8, split = 16, busy = 32 };

  std::atomic<uint64_t> owner;  // run << 32 | thread << 8 | flags; with `many`, those of the first threadgroup
  std::atomic<uint64_t> cell;   // a packed Cell; with `many`, the second threadgroup, for the error message

  static uint64_t pack(uint32_t run, uint32_t thread, uint64_t flags) {
    return uint64_t{run} << 32 | uint64_t{thread} << 8 | flags;
  }
  static uint32_t run(uint64_t owner) { return uint32_t(owner >> 32); }
  static uint32_t thread(uint64_t owner) { return uint32_t(owner >> 8 & 1023); }

  // The highest bit is not set in any packed Cell.
  static uint64_t pack_second(uint32_t threadgroup, uint32_t thread, uint64_t flags) {
    return pack(threadgroup | 1u << 31, thread, flags);
  }
  static bool is_second(uint64_t word) { return word >> 63; }
  static uint32_t threadgroup_of_second(uint64_t word) { return run(word) & ~(1u << 31); }
};

// Lazily mapped memory for the shared cells of successive dispatches.
class ShadowArena {
 public:
  ~ShadowArena();
  uint32_t claim_runs(uint64_t count);
  // Returns cells for a dispatch. All of them are older than the dispatch's runs. Invalidates the cells of the last
  // dispatch.
  SharedCell* claim_cells(size_t count);

 private:
  void release();
  void* mapping_ = nullptr;
  size_t length_ = 0;
  uint64_t next_run_ = 1;
};

ShadowArena& shadow_arena();

}  // namespace simulator
