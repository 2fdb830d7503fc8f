// A launcher that runs nothing: it keeps what the ops ask for, so that the specialisations can be read off the host
// code itself. strict_launches.py puts it in the place of the simulated device's own.
#include <set>
#include <string>

#include "csrc/metal/launch.h"
#include "csrc/metal/shader_source.h"

namespace {

std::string list_of(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

class Recorder : public torch_gdn::Launcher {
 public:
  void run(const std::vector<torch_gdn::Launch>& launches) override {
    for (const auto& launch : launches) {
      lines_.insert(launch.name() + "\t" + launch.kernel + "\t" + list_of(launch.arguments) + "\t" + launch.file +
                    "\t" + std::to_string(launch.bindings.size()) + "\t" + std::to_string(launch.threads) + "\n");
      source_ = torch_gdn::shader_source(launch);
    }
  }
  torch_gdn::PipelineFacts compile(const torch_gdn::Launch&) override { return {}; }
  std::vector<torch_gdn::PipelineFacts> pipelines() const override { return {}; }
  void clear_pipelines() override {}
  torch_gdn::DeviceFacts device() const override { return {}; }

  std::string lines() const {
    std::string text;
    for (const auto& line : lines_) text += line;
    return text;
  }
  const std::string& source() const { return source_; }

 private:
  std::set<std::string> lines_;
  std::string source_;  // of the latest launch
};

Recorder& recorder() {
  static Recorder instance;
  return instance;
}

torch_gdn::Launcher* before = nullptr;

// For ctypes, which copies at once.
const char* kept(std::string text) {
  static std::string last;
  last = std::move(text);
  return last.c_str();
}

}  // namespace

extern "C" {

void recorder_start() {
  before = torch_gdn::has_launcher() ? &torch_gdn::launcher() : nullptr;
  torch_gdn::set_launcher(&recorder());
}
void recorder_stop() { torch_gdn::set_launcher(before); }
const char* recorder_lines() { return kept(recorder().lines()); }
const char* recorder_source() { return kept(recorder().source()); }
}
