#include "memory.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <new>

#include "mps_simulator/engine/engine.h"
#include "mps_simulator/engine/pages.h"

namespace simulator {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<uintptr_t, std::shared_ptr<Memory>> by_start;
};

Registry& registry() {
  static Registry* instance = new Registry;  // outlives buffers that are freed while the process ends
  return *instance;
}

constexpr size_t kManyBytes = size_t{1} << 24;

uintptr_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

// Returns the part of the range that lies in the buffer.
template <class Action>
void with_range(const void* data, size_t length, Action action) {
  const auto memory = find_memory(data);
  if (!memory) return;
  const size_t offset = address(data) - memory->start;
  action(*memory, offset, std::min(length, memory->length - offset));
}

}  // namespace

// calloc leaves pages unmapped until they are written.
ByteBits::ByteBits(size_t length) : words_(static_cast<uint32_t*>(std::calloc(length / 32 + 1, 4))) {
  if (!words_) throw std::bad_alloc();
}

bool ByteBits::test_range(size_t first, size_t count) const {
  for (; count > 16; first += 16, count -= 16) {
    if (!test(first, 16)) return false;
  }
  return test(first, count);
}

size_t ByteBits::count_range(size_t first, size_t count) const {
  size_t sum = 0;
  while (count > 0) {
    const size_t here = std::min(count, 32 - first % 32);
    sum += size_t(std::popcount(uint32_t(load(first / 32) >> first % 32 & ((uint64_t{1} << here) - 1))));
    first += here;
    count -= here;
  }
  return sum;
}

void ByteBits::fill_range(size_t first, size_t count, bool value) {
  if (!value && count > kManyBytes) {
    // Sets all words except those at the ends, which it may share with other threads.
    const size_t begin = first / 32 + 1, end = (first + count) / 32;
    forget_pages(reinterpret_cast<std::byte*>(&words_[begin]), (end - begin) * 4);
    fill_range(first, begin * 32 - first, false);
    return fill_range(end * 32, first + count - end * 32, false);
  }
  while (count > 0) {
    const size_t here = std::min(count, 32 - first % 32);
    uint32_t* word = &words_[first / 32];
    const auto mask = uint32_t(((uint64_t{1} << here) - 1) << first % 32);
    if (here == 32) {
      __atomic_store_n(word, value ? mask : 0, __ATOMIC_RELAXED);
    } else if (value) {
      __atomic_fetch_or(word, mask, __ATOMIC_RELAXED);
    } else {
      __atomic_fetch_and(word, ~mask, __ATOMIC_RELAXED);
    }
    first += here;
    count -= here;
  }
}

std::shared_ptr<Memory> find_memory(const void* data) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  auto after = all.by_start.upper_bound(address(data));
  if (after == all.by_start.begin()) return nullptr;
  const auto& memory = std::prev(after)->second;
  return address(data) - memory->start < memory->length ? memory : nullptr;
}

void memory_created(const void* data, size_t length) {
  auto memory = std::make_shared<Memory>(Memory{address(data), length, ByteBits(length)});
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  all.by_start[address(data)] = std::move(memory);
}

void memory_destroyed(const void* data) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  all.by_start.erase(address(data));
}

void memory_written(const void* data, size_t length) {
  with_range(data, length, [](Memory& memory, size_t first, size_t count) { memory.written.set_range(first, count); });
}

void memory_recycled(const void* data, size_t length) {
  with_range(data, length,
             [](Memory& memory, size_t first, size_t count) { memory.written.clear_range(first, count); });
}

bool memory_is_written(const void* data, size_t length) {
  const auto memory = find_memory(data);
  if (!memory) return false;
  const size_t offset = address(data) - memory->start;
  return length <= memory->length - offset && memory->written.test_range(offset, length);
}

}  // namespace simulator
