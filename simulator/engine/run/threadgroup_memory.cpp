#include "threadgroup_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "simulator/engine/engine.h"

namespace simulator {
namespace {

constexpr size_t kSlotSize = 3 * kMaxThreadgroupMemory;
// Arrays at the same offset in their pages would share a few sets of the first-level cache.
constexpr size_t kColourStride = 1088;

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

const ThreadgroupArray& ThreadgroupMemory::add(const char* name, size_t size, size_t alignment, size_t element,
                                               int32_t index) {
  std::byte* data = mapping_ + count_ * kSlotSize + kMaxThreadgroupMemory + count_ % 4 * kColourStride;
  std::memset(data, 0xFF, size);
  total_ += (size + 15) / 16 * 16;
  return arrays_[count_++] = {name, data, size, std::max<size_t>(alignment, 1), std::max<size_t>(element, 1), index};
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
