// The threadgroup memory of one worker. A GPU packs a kernel's arrays in its own order, so one array says nothing about
// where another lies. Here each array lies in a slot that the seed chooses, with only the alignment that its type
// requires. Arrays are so far apart that an index out of bounds by less than 32 KB hits none of them.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace simulator {

struct ThreadgroupArray {
  const char* name;
  std::byte* data;
  size_t size, alignment, element;  // element: the size of one value, if it is known
  int32_t index;                    // of [[threadgroup(index)]]; -1: declared in the kernel's body
};

class ThreadgroupMemory {
 public:
  static constexpr size_t kMaxArrays = 64;

  ThreadgroupMemory();
  ~ThreadgroupMemory();
  ThreadgroupMemory(const ThreadgroupMemory&) = delete;
  ThreadgroupMemory& operator=(const ThreadgroupMemory&) = delete;

  void begin_dispatch(uint64_t seed);
  // Fills the memory with NaN in every format: what the last threadgroup left has no value.
  void poison();
  const ThreadgroupArray& add(const char* name, size_t size, size_t alignment, size_t element, int32_t index);
  const ThreadgroupArray* find(const char* name,
                               size_t size) const;  // among the arrays that the kernel's body declares
  size_t total() const { return total_; }
  bool is_full() const { return count_ == kMaxArrays; }

 private:
  std::byte* place(size_t alignment);
  std::byte* mapping_;
  uint64_t seed_ = 0;
  std::array<ThreadgroupArray, kMaxArrays> arrays_;
  size_t count_ = 0, total_ = 0;
};

}  // namespace simulator
