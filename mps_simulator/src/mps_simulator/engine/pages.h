// Gets memory from the operating system. The memory is zero, and only pages that are written use physical memory.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

namespace simulator {

inline std::byte* new_pages(size_t length) {
  void* mapping = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(mapping);
}

inline void free_pages(std::byte* data, size_t length) { munmap(data, length); }

// Sets the memory to zero again, and returns whole pages to the system.
inline void forget_pages(std::byte* data, size_t length) {
  constexpr uintptr_t kPage = 4096;
  const auto start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (start + kPage - 1) / kPage * kPage, last = (start + length) / kPage * kPage;
  if (first >= last) {
    std::memset(data, 0, length);
    return;
  }
  std::memset(data, 0, first - start);
  madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  std::memset(reinterpret_cast<void*>(last), 0, start + length - last);
}

}  // namespace simulator
