#include "event.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>

#include "mps_simulator/metal/device.h"

namespace simulator {

struct Event::Reached {
  std::atomic<bool> yes{false};
  std::chrono::steady_clock::time_point time;
};

void Event::record() {
  auto reached = std::make_shared<Reached>();
  last_ = reached;
  auto mark = [reached] {
    reached->time = std::chrono::steady_clock::now();
    reached->yes = true;
  };
  enqueue_bookkeeping(mark, nullptr);
  commit_stream();
}

bool Event::query() const { return !last_ || last_->yes; }

void Event::synchronize() const {
  if (!query()) wait_for_stream();
}

double Event::milliseconds_until(const Event& later) const {
  TORCH_CHECK(last_ && later.last_, "elapsed time of events that were not recorded");
  synchronize();
  later.synchronize();
  return std::chrono::duration<double, std::milli>(later.last_->time - last_->time).count();
}

}  // namespace simulator
