#include "metal/recorder.h"

namespace torch_gdn {

namespace {

// The device's launcher skips it too.
bool is_empty(const Launch& launch) {
  const auto& groups = launch.threadgroups;
  return groups[0] * groups[1] * groups[2] == 0;
}

}  // namespace

void Recorder::run(const std::vector<Launch>& launches) {
  for (const auto& launch : launches) {
    if (is_empty(launch)) continue;
    launches_.push_back(
        {launch.kernel, launch.file, launch.arguments, launch.bindings.size(), launch.threadgroups, launch.threads});
  }
}

void Tracer::run(const std::vector<Launch>& launches) {
  for (const auto& launch : launches) {
    if (is_empty(launch)) continue;
    before_(launch);
    if (runs_) device_launcher().run({launch});
    after_(launch);
  }
}

}  // namespace torch_gdn
