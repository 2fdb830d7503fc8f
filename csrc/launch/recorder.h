// A launcher that runs nothing and stores the launches. With it, the host code itself says which kernel variants a
// model needs.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "launch/launch.h"

namespace torch_gdn {

// Holds no tensors, because their memory would then stay allocated for a whole forward pass.
struct RecordedLaunch {
  Variant variant;
  size_t bindings;
  std::vector<std::pair<size_t, size_t>> overlaps;  // pairs of bindings that have bytes in common
  Grid threadgroups;
  int64_t threads;
};

// Replaces the device's launcher, but asks it for facts, because the heuristics need them.
class ReplacedLauncher : public Launcher {
 public:
  std::vector<PipelineFacts> compile(c10::ArrayRef<Variant> variants) override {
    return device_launcher().compile(variants);
  }
  std::vector<PipelineFacts> pipelines() const override { return device_launcher().pipelines(); }
  void clear_pipelines() override { device_launcher().clear_pipelines(); }
  const DeviceFacts& device() const override { return device_launcher().device(); }
  double wait_and_time() override { return device_launcher().wait_and_time(); }
};

class Recorder final : public ReplacedLauncher {
 public:
  void run(Launches launches) override;
  std::vector<RecordedLaunch> launches() const;  // on any thread

 private:
  mutable std::mutex mutex_;
  std::vector<RecordedLaunch> launches_;  // guarded by mutex_
};

// Passes each launch and its tensors to `before`, runs the launch on the device unless told not to, and passes it to
// `after`. The callbacks can store what a launch read and what it wrote.
class Tracer final : public ReplacedLauncher, public std::enable_shared_from_this<Tracer> {
 public:
  using Callback = std::function<void(const Launch&)>;
  Tracer(Callback before, Callback after, bool runs)
      : before_(std::move(before)), after_(std::move(after)), runs_(runs) {}
  void run(Launches launches) override;

 private:
  Callback before_, after_;
  bool runs_;
};

}  // namespace torch_gdn
