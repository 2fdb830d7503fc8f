// The threadgroup memory of one worker. A GPU packs a kernel's arrays in an order of its own, so the address of one
// array says nothing about that of another. Here each array lies in a slot that the seed chooses, with only the
// alignment that its type requires. The arrays are so far apart that an index that is out of bounds by less than 32 KB
// does not reach another array.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace simulator {

struct ThreadgroupArray {
  const char* name;
  std::byte* data;
  size_t size, alignment, element;  // element: the size of one value, if known
  int32_t index;                    // index in [[threadgroup(index)]]; -1 if the kernel's body declares the array
};

class ThreadgroupMemory {
 public:
  static constexpr size_t kMaxArrays = 64;

  ThreadgroupMemory();
  ~ThreadgroupMemory();
  ThreadgroupMemory(const ThreadgroupMemory&) = delete;
  ThreadgroupMemory& operator=(const ThreadgroupMemory&) = delete;

  void begin_dispatch(uint64_t seed);
  // Fills the memory with a pattern that is NaN in every format, because a threadgroup must not read what the last one
  // left.
  void poison();
  const ThreadgroupArray& add(const char* name, size_t size, size_t alignment, size_t element, int32_t index);
  const ThreadgroupArray* find(const char* name,
                               size_t size) const;  // searches the arrays that the kernel's body declares
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
