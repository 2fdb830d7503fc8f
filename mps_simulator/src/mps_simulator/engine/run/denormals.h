// Metal may flush denormals. The perturbing mode always flushes them, through a control register of the processor.
#pragma once
#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace simulator {

// Returns the previous setting.
inline bool flush_denormals(bool on) {
#if defined(__x86_64__)
  constexpr uint32_t kFlush = 0x8040;  // flushes results and operands
  const uint32_t present = _mm_getcsr();
  const uint32_t wanted = on ? present | kFlush : present & ~kFlush;
  if (wanted != present) _mm_setcsr(wanted);
#elif defined(__aarch64__)
  constexpr uint64_t kFlush = 1u << 24;
  uint64_t present;
  asm volatile("mrs %0, fpcr" : "=r"(present));
  const uint64_t wanted = on ? present | kFlush : present & ~kFlush;
  if (wanted != present) asm volatile("msr fpcr, %0" : : "r"(wanted));
#else
#error "flushing denormals is not implemented for this processor"
#endif
  return present & kFlush;
}

}  // namespace simulator
