#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "mps_simulator/engine/kernel_abi.h"
#include "random.h"
#include "worker.h"

using simulator::current_worker;

extern "C" {

const uint8_t* simulator_reduction_order(void) { return current_worker->reduction_order(); }

void* simulator_threadgroup_array(const char* name, size_t size, size_t alignment) {
  return current_worker->threadgroup_array(name, size, alignment);
}

// Moves a given value always by the same amount, so that you can repeat a result.
float simulator_perturb(float value, float ulps) {
  if (!current_worker) return value;  // computes a constant of the program while it is loaded
  const simulator::Settings& settings = current_worker->settings();
  if (!settings.perturb || !std::isfinite(value) || value == 0) return value;
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto reach = int64_t(std::max(ulps, 0.0f));
  const auto chance = int64_t(simulator::mix(settings.seed ^ simulator::mix(bits)) >> 33);
  constexpr int64_t kSmallestNormal = 0x00800000, kLargest = 0x7F7FFFFF;
  const int64_t magnitude = int64_t(bits & 0x7FFFFFFF) + chance % (2 * reach + 1) - reach;
  if (magnitude < kSmallestNormal) return std::copysign(0.0f, value);
  return std::bit_cast<float>(uint32_t(std::min(magnitude, kLargest)) | (bits & 0x80000000));
}

void simulator_enter_block(uint32_t block) {
  if (simulator::current_watch) simulator::current_watch->enter_block(block);
}

void simulator_count_multiply(void) { current_worker->count_multiply(); }

}  // extern "C"
