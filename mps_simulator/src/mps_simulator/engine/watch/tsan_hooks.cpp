// Code compiled with clang's -fsanitize=thread calls these functions before each load and store of a kernel. They
// replace the sanitizer's own runtime.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "watch_access.h"

namespace {

using simulator::Action;
using simulator::current_watch;

template <Action action>
[[gnu::always_inline]] inline void see(const volatile void* data, size_t size, bool is_natural, const void* site) {
  simulator::Watch* watch = current_watch;
  if (watch) watch->access<action>(reinterpret_cast<uintptr_t>(data), size, is_natural, site);
}

template <Action action>
void see_range(const void* data, size_t size, const void* site) {
  simulator::Watch* watch = current_watch;
  if (watch) watch->access_range<action>(reinterpret_cast<uintptr_t>(data), size, site);
}

}  // namespace

#define SITE __builtin_return_address(0)

#define ACCESSES(size)                                                                           \
  void __tsan_read##size(void* data) { see<Action::read>(data, size, true, SITE); }              \
  void __tsan_write##size(void* data) { see<Action::write>(data, size, true, SITE); }            \
  void __tsan_unaligned_read##size(void* data) { see<Action::read>(data, size, false, SITE); }   \
  void __tsan_unaligned_write##size(void* data) { see<Action::write>(data, size, false, SITE); } \
  void __tsan_read_write##size(void* data) {                                                     \
    see<Action::read>(data, size, true, SITE);                                                   \
    see<Action::write>(data, size, true, SITE);                                                  \
  }                                                                                              \
  void __tsan_unaligned_read_write##size(void* data) {                                           \
    see<Action::read>(data, size, false, SITE);                                                  \
    see<Action::write>(data, size, false, SITE);                                                 \
  }

#define UPDATE(bits, name, builtin)                                                                       \
  uint##bits##_t __tsan_atomic##bits##_##name(volatile uint##bits##_t* data, uint##bits##_t value, int) { \
    see<Action::atomic_update>(data, bits / 8, true, SITE);                                               \
    return builtin(data, value, __ATOMIC_RELAXED);                                                        \
  }

#define ATOMICS(bits)                                                                                               \
  uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* data, int) {                             \
    see<Action::atomic_load>(data, bits / 8, true, SITE);                                                           \
    return __atomic_load_n(data, __ATOMIC_RELAXED);                                                                 \
  }                                                                                                                 \
  void __tsan_atomic##bits##_store(volatile uint##bits##_t* data, uint##bits##_t value, int) {                      \
    see<Action::atomic_store>(data, bits / 8, true, SITE);                                                          \
    __atomic_store_n(data, value, __ATOMIC_RELAXED);                                                                \
  }                                                                                                                 \
  uint##bits##_t __tsan_atomic##bits##_compare_exchange_val(volatile uint##bits##_t* data, uint##bits##_t expected, \
                                                            uint##bits##_t wanted, int, int) {                      \
    see<Action::atomic_update>(data, bits / 8, true, SITE);                                                         \
    __atomic_compare_exchange_n(data, &expected, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);                \
    return expected;                                                                                                \
  }                                                                                                                 \
  UPDATE(bits, exchange, __atomic_exchange_n)                                                                       \
  UPDATE(bits, fetch_add, __atomic_fetch_add)                                                                       \
  UPDATE(bits, fetch_sub, __atomic_fetch_sub)                                                                       \
  UPDATE(bits, fetch_and, __atomic_fetch_and)                                                                       \
  UPDATE(bits, fetch_or, __atomic_fetch_or)                                                                         \
  UPDATE(bits, fetch_xor, __atomic_fetch_xor)                                                                       \
  UPDATE(bits, fetch_nand, __atomic_fetch_nand)

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

ATOMICS(8)
ATOMICS(16)
ATOMICS(32)
ATOMICS(64)
void __tsan_atomic_thread_fence(int) {}
void __tsan_atomic_signal_fence(int) {}

void* __tsan_memcpy(void* to, const void* from, size_t size) {
  see_range<Action::read>(from, size, SITE);
  see_range<Action::write>(to, size, SITE);
  return std::memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, size_t size) {
  see_range<Action::read>(from, size, SITE);
  see_range<Action::write>(to, size, SITE);
  return std::memmove(to, from, size);
}
void* __tsan_memset(void* to, int value, size_t size) {
  see_range<Action::write>(to, size, SITE);
  return std::memset(to, value, size);
}

}  // extern "C"
