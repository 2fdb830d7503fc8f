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
  size_t length;                 // a reference ends after its one value, a pointer with its buffer
  ArgumentCopy* copy = nullptr;  // of an argument that another overlaps; `start` is there
};

// The bytes of one buffer that a dispatch has used.
struct Touched {
  size_t length;
  ByteBits read, written;
  explicit Touched(size_t length) : length(length), read(length), written(length) {}
};

// A range of addresses in which every byte gets the same checks. Segments don't overlap.
struct Segment {
  enum Kind : uint8_t { device, threadgroup, bytes, module };

  uintptr_t start = 0;
  size_t length = 0;
  Kind kind = device;
  bool is_writable = false;
  bool may_race = false;               // false if no argument is writable
  uint8_t unit_log2 = 0;               // bytes per cell
  ByteBits* written = nullptr;         // null: every byte has a value
  uintptr_t written_start = 0;         // the address of the first bit
  Touched* touched = nullptr;          // device memory in a detailed profile: bits as in `written`
  ArgumentCopy* copy = nullptr;        // see Window
  uintptr_t shadow_start = 0;          // the address of the first cell
  uint64_t* cells = nullptr;           // threadgroup memory: one for each unit,
  uint64_t* byte_cells = nullptr;      // and one for each byte of a unit that is used in parts
  SharedCell* shared_cells = nullptr;  // device memory: the same
  SharedCell* shared_byte_cells = nullptr;
};

// Returns the largest unit that no array of this alignment divides: 1, 2 or 4 bytes.
uint8_t unit_log2(size_t alignment);

struct Layout {
  std::vector<Window> windows;
  std::vector<const simulator_parameter*> absent;
  std::vector<Segment> segments;
  std::vector<std::shared_ptr<Memory>> memories;  // keeps the bits alive
  std::vector<std::unique_ptr<Touched>> touched;  // of each memory, in a detailed profile
  std::vector<std::unique_ptr<ArgumentCopy>> copies;
  std::array<std::byte*, kMaxBuffers> data{};  // of each buffer, as the kernel gets it
  uint32_t first_run = 0;                      // the run of threadgroup 0; see shadow.h

  Layout(const Dispatch& dispatch, uint64_t threadgroup_count, bool is_detailed);
  void count_distinct(KernelFigures& figures) const;
  // Call this after the dispatch. It copies what the kernel wrote back to the buffers, and returns what aliases, or "".
  std::string end_copies() const;

 private:
  const Window& copied(const Window& window, const std::shared_ptr<Memory>& memory);
};

}  // namespace simulator
