#include "launch/launch.h"

#include <c10/util/Exception.h>

#include <utility>

#include "launch/recorder.h"

namespace torch_gdn {

namespace {
Launcher* registered_launcher = nullptr;
thread_local Launcher* recorder_of_thread = nullptr;
std::string registered_directory;
}  // namespace

TemplateArgument::TemplateArgument(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      word_ = kFloat;
      break;
    case at::kHalf:
      word_ = kHalf;
      break;
    case at::kBFloat16:
      word_ = kBfloat;
      break;
    default:
      TORCH_CHECK_TYPE(false, "torch_gdn: expected dtype BFloat16, Half or Float, got ", dtype);
  }
}

int32_t TemplateArgument::number(int64_t value) {
  TORCH_INTERNAL_ASSERT(value >= 0 && value <= INT32_MAX);
  return int32_t(value);
}

std::string TemplateArgument::spelled() const {
  static constexpr std::array<const char*, -kNone> words = {"", "float", "half", "bfloat", "false", "true"};
  return word_ < 0 ? words[size_t(word_ - kNone)] : std::to_string(word_);
}

std::string Variant::name() const {
  std::string text = kernel;
  for (const auto& argument : arguments) text += "_" + argument;
  return text;
}

Variant Launch::variant_of(const char* kernel, const char* file, const TemplateArguments& arguments) {
  Variant variant{kernel, file, {}};
  for (const auto& argument : arguments) {
    if (!argument.is_none()) variant.arguments.push_back(argument.spelled());
  }
  return variant;
}

Launcher& launcher() { return recorder_of_thread ? *recorder_of_thread : device_launcher(); }

Launcher& device_launcher() {
  TORCH_CHECK(registered_launcher != nullptr,
              "torch_gdn: no Metal launcher is loaded; on macOS build torch_gdn there, elsewhere call "
              "mps_simulator.activate() in a checkout first");
  return *registered_launcher;
}

int64_t busy_threadgroups() { return 3 * int64_t(launcher().device().core_count); }

bool has_launcher() { return registered_launcher != nullptr; }

void set_launcher(Launcher* launcher) { registered_launcher = launcher; }

// A tracer's launches run, and write their outputs.
bool is_recording() { return recorder_of_thread && !dynamic_cast<Tracer*>(recorder_of_thread); }

Launcher* set_recorder(Launcher* recorder) { return std::exchange(recorder_of_thread, recorder); }

const std::string& shader_directory() { return registered_directory; }

void set_shader_directory(std::string directory) { registered_directory = std::move(directory); }

}  // namespace torch_gdn
