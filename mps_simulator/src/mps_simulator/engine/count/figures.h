#pragma once
#include <chrono>
#include <string>

#include "mps_simulator/engine/engine.h"

namespace simulator {

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

// Adds counts, and keeps the larger of the two threadgroup memory sizes.
void add_figures(KernelFigures& sum, const KernelFigures& more);
void record_figures(const std::string& kernel, const KernelFigures& more);

}  // namespace simulator
