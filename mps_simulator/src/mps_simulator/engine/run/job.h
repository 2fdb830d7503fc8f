// One dispatch, as workers see it. Only its two atomics change while it runs.
#pragma once
#include <atomic>
#include <string>

#include "mps_simulator/engine/engine.h"
#include "mps_simulator/engine/kernel_abi.h"
#include "mps_simulator/engine/watch/layout.h"

namespace simulator {

struct Job {
  const Dispatch& dispatch;
  const simulator_kernel& kernel;
  Settings settings;
  Size threadgroups, threads;  // `threads` is the size of the whole grid
  unsigned workers = 1;
  const Layout* layout = nullptr;  // null without watch
  std::atomic<uint64_t> next{0};   // next threadgroup; see Settings::parts
  std::atomic<bool> stopped{false};

  explicit Job(const Dispatch& dispatch);

  simulator_uint3 group_position(uint64_t index) const {
    const uint64_t row = index / threadgroups.width;
    return {uint32_t(index % threadgroups.width), uint32_t(row % threadgroups.height),
            uint32_t(row / threadgroups.height)};
  }
  // Returns the size of a threadgroup. It is smaller at the edges of a grid that dispatchThreads defined.
  simulator_uint3 group_size(simulator_uint3 position) const;
};

// Returns "(x, y, z)".
std::string text(simulator_uint3 position);
simulator_uint3 thread_position(uint32_t index, simulator_uint3 size);

}  // namespace simulator
