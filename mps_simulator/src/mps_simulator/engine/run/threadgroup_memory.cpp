#include "threadgroup_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "mps_simulator/engine/engine.h"
#include "random.h"

namespace simulator {
namespace {

constexpr size_t kSlotSize = 3 * kMaxThreadgroupMemory;
static_assert((ThreadgroupMemory::kMaxArrays & (ThreadgroupMemory::kMaxArrays - 1)) == 0, "place() exchanges slots");
// Spreads the arrays over this many bytes. Arrays at the same offset in their pages would share a few sets of the
// first-level cache.
constexpr size_t kSpread = 4096;

}  // namespace

ThreadgroupMemory::ThreadgroupMemory() {
  void* mapping =
      mmap(nullptr, kMaxArrays * kSlotSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<std::byte*>(mapping);
}

ThreadgroupMemory::~ThreadgroupMemory() { munmap(mapping_, kMaxArrays * kSlotSize); }

void ThreadgroupMemory::poison() {
  for (size_t i = 0; i < count_; ++i) std::memset(arrays_[i].data, 0xFF, arrays_[i].size);
}

void ThreadgroupMemory::begin_dispatch(uint64_t seed) {
  count_ = total_ = 0;
  seed_ = seed;
}

// Returns an address in the array's slot, at an odd multiple of the alignment.
std::byte* ThreadgroupMemory::place(size_t alignment) {
  const size_t slot = (count_ ^ mix(seed_)) % kMaxArrays;
  const size_t multiples = std::max<size_t>(kSpread / (2 * alignment), 1);
  const size_t multiple = 2 * (mix(seed_ ^ mix(count_)) % multiples) + 1;
  return mapping_ + slot * kSlotSize + kMaxThreadgroupMemory + multiple * alignment;
}

const ThreadgroupArray& ThreadgroupMemory::add(const char* name, size_t size, size_t alignment, size_t element,
                                               int32_t index) {
  alignment = std::max<size_t>(alignment, 1);
  // If the host sets the length, Metal allocates memory in units of 16 bytes.
  std::byte* data = place(index < 0 ? alignment : std::max<size_t>(alignment, 16));
  std::memset(data, 0xFF, size);
  total_ += (size + 15) / 16 * 16;
  return arrays_[count_++] = {name, data, size, alignment, std::max<size_t>(element, 1), index};
}

const ThreadgroupArray* ThreadgroupMemory::find(const char* name, size_t size) const {
  for (size_t i = 0; i < count_; ++i) {
    const ThreadgroupArray& array = arrays_[i];
    if (array.index < 0 && array.size == size && (array.name == name || std::strcmp(array.name, name) == 0))
      return &array;
  }
  return nullptr;
}

}  // namespace simulator
