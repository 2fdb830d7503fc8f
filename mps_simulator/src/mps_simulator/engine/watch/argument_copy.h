// Finds arguments that alias. Metal forbids aliases. Its compiler assumes that if a kernel writes a byte through one
// argument, it neither reads nor writes that byte through another.
//
// Views of one storage overlap in a buffer, because each is bound from its offset to the buffer's end. An address then
// does not tell which argument an access goes through. While the kernel runs, such arguments are therefore copies in
// separate memory. A chunk is copied when it is first used. What the kernel wrote is copied back.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "memory.h"

namespace simulator {

class ArgumentCopy {
 public:
  // Copies `length` bytes at address `start`, which lies in `memory`.
  ArgumentCopy(std::shared_ptr<const Memory> memory, uintptr_t start, size_t length);
  ~ArgumentCopy();
  ArgumentCopy(const ArgumentCopy&) = delete;
  ArgumentCopy& operator=(const ArgumentCopy&) = delete;

  uintptr_t start() const { return reinterpret_cast<uintptr_t>(data_); }
  size_t first() const { return first_; }  // offset of the argument in the memory, in bytes
  // Returns the offset between the copy's addresses and the addresses in the memory.
  uintptr_t distance() const { return start() - (memory_->start + first_); }

  // Called before each access. Several workers may call it at once.
  void use(uintptr_t address, size_t size, bool is_read, bool is_write) {
    const size_t first = address - start() + first_;
    for (size_t chunk = first / kChunk; chunk <= (first + size - 1) / kChunk; ++chunk) {
      if (!__atomic_load_n(&is_here_[chunk], __ATOMIC_ACQUIRE)) [[unlikely]]
        fetch(chunk);
    }
    if (is_read) read_.set(first, size);
    if (is_write) written_.set(first, size);
  }

  // Call this after the kernel.
  void write_back() const;

  // Describes a byte of the memory that the kernel used through both arguments, and wrote through at least one of them.
  struct Clash {
    size_t offset;  // offset in the memory
    bool is_written_here, is_written_there;
  };
  std::optional<Clash> clash_with(const ArgumentCopy& other) const;

 private:
  static constexpr size_t kChunk = 4096;
  struct Range {
    size_t first, end;
  };
  Range range_of(size_t chunk) const;  // range of the argument's bytes in a chunk, as offsets in the memory
  void fetch(size_t chunk);

  std::shared_ptr<const Memory> memory_;
  size_t first_, length_;  // the argument's bytes in the memory
  std::byte *pages_, *data_;
  std::unique_ptr<bool[]> is_here_;  // indexed by the chunk of the memory
  std::vector<size_t> chunks_;       // chunks that are copied
  std::mutex mutex_;
  ByteBits read_, written_;  // indexed by offset in the memory
};

}  // namespace simulator
