// Records where each device buffer lies, and which of its bytes were ever written.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace simulator {

// One bit per byte. Several workers set bits at once. Relaxed order is enough: if two threads of a dispatch read and
// set the same bit, they are reported as a race.
class ByteBits {
 public:
  explicit ByteBits(size_t length);

  // `count` is at most 16.
  bool test(size_t first, size_t count) const {
    const size_t shift = first % 32;
    uint64_t bits = load(first / 32);
    if (shift + count > 32) bits |= uint64_t{load(first / 32 + 1)} << 32;
    const uint64_t mask = (uint64_t{1} << count) - 1;
    return (bits >> shift & mask) == mask;
  }
  void set(size_t first, size_t count) {
    if (!test(first, count)) set_range(first, count);
  }
  // Writes nothing if all bits are already set, so that workers that set the same bytes do not contend.
  void set_range_once(size_t first, size_t count) {
    if (!test_range(first, count)) set_range(first, count);
  }
  void set_alone(size_t first, size_t count) {
    const size_t shift = first % 32;
    const uint64_t mask = ((uint64_t{1} << count) - 1) << shift;
    words_[first / 32] |= uint32_t(mask);
    if (shift + count > 32) words_[first / 32 + 1] |= uint32_t(mask >> 32);
  }
  bool test_range(size_t first, size_t count) const;
  size_t count_range(size_t first, size_t count) const;
  void set_range(size_t first, size_t count) { fill_range(first, count, true); }
  void clear_range(size_t first, size_t count) { fill_range(first, count, false); }

 private:
  struct Free {
    void operator()(uint32_t* words) const { std::free(words); }
  };
  uint32_t load(size_t word) const { return __atomic_load_n(&words_[word], __ATOMIC_RELAXED); }
  void fill_range(size_t first, size_t count, bool value);
  std::unique_ptr<uint32_t[], Free> words_;
};

struct Memory {
  uintptr_t start;
  size_t length;
  ByteBits written;
};

// Returns the buffer that holds this address, or null.
std::shared_ptr<Memory> find_memory(const void* data);

}  // namespace simulator
