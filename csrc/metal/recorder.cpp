#include "metal/recorder.h"

namespace torch_gdn {

void Recorder::run(const std::vector<Launch>& launches) {
  for (const auto& launch : launches) {
    const auto& groups = launch.threadgroups;
    if (groups[0] * groups[1] * groups[2] == 0) continue;  // the device's launcher skips it too
    launches_.push_back(
        {launch.kernel, launch.file, launch.arguments, launch.bindings.size(), launch.threadgroups, launch.threads});
  }
}

}  // namespace torch_gdn
