#include "launch/recorder.h"

#include "launch/self_test.h"
#include "ops/arguments.h"

namespace torch_gdn {

namespace {

std::vector<std::pair<size_t, size_t>> overlaps_of(const Bindings& bindings) {
  std::vector<std::pair<size_t, size_t>> overlaps;
  for (const auto* one = bindings.begin(); one != bindings.end(); ++one) {
    for (const auto* other = one + 1; other != bindings.end(); ++other) {
      const bool are_tensors = one->kind == Binding::Kind::kTensor && other->kind == Binding::Kind::kTensor;
      if (!are_tensors || !share_memory(one->tensor, other->tensor)) continue;
      overlaps.emplace_back(one - bindings.begin(), other - bindings.begin());
    }
  }
  return overlaps;
}

}  // namespace

void Recorder::run(Launches launches) {
  if (!are_tested(launches, /*unless_failed=*/true)) throw Untested();  // what replaces them is recorded
  const std::lock_guard<std::mutex> guard(mutex_);
  for (const auto& launch : launches) {
    if (launch.is_empty()) continue;
    launches_.push_back(
        {launch.variant(), launch.bindings.size(), overlaps_of(launch.bindings), launch.threadgroups, launch.threads});
  }
}

std::vector<RecordedLaunch> Recorder::launches() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return launches_;
}

void Tracer::run(Launches launches) {
  if (runs_ && !are_tested(launches)) throw Untested();  // before the callbacks see them
  const auto alive = shared_from_this();                 // a callback may end the tracing
  for (const auto& launch : launches) {
    if (launch.is_empty()) continue;
    before_(launch);
    if (runs_) device_launcher().run(launch);
    after_(launch);
  }
}

}  // namespace torch_gdn
