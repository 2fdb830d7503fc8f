#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "argument_copy.h"
#include "memory.h"
#include "mps_simulator/engine/engine.h"
#include "mps_simulator/engine/kernel_abi.h"
#include "shadow.h"

namespace simulator {

struct Window {
  const simulator_parameter* parameter;
  uintptr_t start;
  size_t length;                 // a reference ends after its only value, a pointer at its buffer's end
  ArgumentCopy* copy = nullptr;  // the copy of an argument that another one overlaps; `start` is in the copy
};

// The bytes of a buffer that a dispatch has used.
struct Touched {
  size_t length;
  ByteBits read, written;
  explicit Touched(size_t length) : length(length), read(length), written(length) {}
};

// A range of addresses in which every byte gets the same checks. Segments do not overlap.
struct Segment {
  enum Kind : uint8_t { device, threadgroup, bytes, module };

  uintptr_t start = 0;
  size_t length = 0;
  Kind kind = device;
  bool is_writable = false;
  bool may_race = false;               // false if no argument is writable
  uint8_t unit_log2 = 0;               // bytes per cell
  ByteBits* written = nullptr;         // null if every byte has a value
  uintptr_t written_start = 0;         // the address of the first bit
  Touched* touched = nullptr;          // for device memory in a detailed profile; has the same bits as `written`
  ArgumentCopy* copy = nullptr;        // see Window
  uintptr_t shadow_start = 0;          // the address of the first cell
  uint64_t* cells = nullptr;           // for threadgroup memory: one cell per unit,
  uint64_t* byte_cells = nullptr;      // and one per byte of a unit that is used in parts
  SharedCell* shared_cells = nullptr;  // the same for device memory
  SharedCell* shared_byte_cells = nullptr;
};

// Returns log2 of the largest unit, 1, 2 or 4 bytes, that no boundary of an array with this alignment splits.
uint8_t unit_log2(size_t alignment);

struct Layout {
  std::vector<Window> windows;
  std::vector<const simulator_parameter*> absent;
  std::vector<Segment> segments;
  std::vector<std::shared_ptr<Memory>> memories;  // keeps the bits alive
  std::vector<std::unique_ptr<Touched>> touched;  // one per memory, in a detailed profile
  std::vector<std::unique_ptr<ArgumentCopy>> copies;
  std::array<std::byte*, kMaxBuffers> data{};  // the address that the kernel gets for each buffer
  uint32_t first_run = 0;                      // the run number of threadgroup 0; see shadow.h

  Layout(const Dispatch& dispatch, uint64_t threadgroup_count, bool is_detailed);
  void count_distinct(KernelFigures& figures) const;
  // Call this after the dispatch. It copies what the kernel wrote back to the buffers. Returns a description of an
  // alias, or "".
  std::string end_copies() const;

 private:
  const Window& copied(const Window& window, const std::shared_ptr<Memory>& memory);
};

}  // namespace simulator
