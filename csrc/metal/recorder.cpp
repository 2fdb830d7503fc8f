#include "metal/recorder.h"

namespace torch_gdn {

void Recorder::run(Launches launches) {
  for (const auto& launch : launches) {
    if (launch.is_empty()) continue;
    launches_.push_back(
        {launch.kernel, launch.file, launch.arguments, launch.bindings.size(), launch.threadgroups, launch.threads});
  }
}

void Tracer::run(Launches launches) {
  for (const auto& launch : launches) {
    if (launch.is_empty()) continue;
    before_(launch);
    if (runs_) device_launcher().run(launch);
    after_(launch);
  }
}

}  // namespace torch_gdn
