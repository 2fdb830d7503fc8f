#include "metal/launch.h"

#include <c10/util/Exception.h>

namespace torch_gdn {

namespace {
Launcher* registered_launcher = nullptr;
std::string registered_directory;
}  // namespace

std::string Launch::name() const {
  std::string text = kernel;
  for (const auto& argument : arguments) text += "_" + argument;
  return text;
}

Launcher& launcher() {
  TORCH_CHECK(registered_launcher != nullptr,
              "torch_gdn: no Metal launcher is loaded; on macOS build torch_gdn there, elsewhere call "
              "simulator.activate() from a checkout first");
  return *registered_launcher;
}

bool has_launcher() { return registered_launcher != nullptr; }

void set_launcher(Launcher* launcher) { registered_launcher = launcher; }

const std::string& shader_directory() { return registered_directory; }

void set_shader_directory(std::string directory) { registered_directory = std::move(directory); }

}  // namespace torch_gdn
