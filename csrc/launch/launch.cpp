#include "launch/launch.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>

#include "launch/recorder.h"

namespace torch_gdn {

namespace {
Launcher* registered_launcher = nullptr;
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

static constexpr std::array<const char*, 6> kWords = {"", "float", "half", "bfloat", "false", "true"};

std::string TemplateArgument::spelled() const {
  static_assert(kWords.size() == -kNone);
  return word_ < 0 ? kWords[size_t(word_ - kNone)] : std::to_string(word_);
}

TemplateArgument TemplateArgument::spelled_as(const std::string& text) {
  TemplateArgument argument;
  const auto* word = std::find(kWords.begin() + 1, kWords.end(), text);
  if (word != kWords.end()) {
    argument.word_ = kNone + int32_t(word - kWords.begin());
    return argument;
  }
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), argument.word_);
  TORCH_CHECK_VALUE(parsed.ec == std::errc() && parsed.ptr == text.data() + text.size() && argument.word_ >= 0,
                    "torch_gdn: expected float, half, bfloat, false, true or a number as a template argument, got '",
                    text, "'");
  return argument;
}

Binding::Kind Binding::host_array(const at::Tensor& value) {
  TORCH_CHECK_VALUE(value.is_contiguous() && value.nbytes() <= kMostOfSetBytes,
                    "torch_gdn: expected a contiguous array of at most ", kMostOfSetBytes,
                    " bytes as a CPU binding, got ", value.nbytes(), " bytes with strides ", value.strides());
  return Kind::kHostArray;
}

Bindings Bindings::of(c10::ArrayRef<Binding> bindings, c10::ArrayRef<std::byte> block) {
  TORCH_CHECK_VALUE(bindings.size() <= kMost, "torch_gdn: expected at most ", kMost, " bindings, got ",
                    bindings.size());
  TORCH_CHECK_VALUE(block.size() <= kMostOfSetBytes, "torch_gdn: expected at most ", kMostOfSetBytes,
                    " bytes in a parameter block, got ", block.size());
  Bindings result;
  for (const auto& binding : bindings) result.add(binding);
  result.outer_block_ = block.data();
  result.block_bytes_ = block.size();
  return result;
}

std::string Variant::name() const {
  std::string text = kernel;
  for (const auto& argument : arguments) text += "_" + argument;
  return text;
}

Variant Launch::variant() const {
  const std::string path = kernel;
  Variant variant{path.substr(path.rfind('/') + 1), file != nullptr ? file : path + ".metal", {}};
  for (const auto& argument : arguments) {
    if (!argument.is_none()) variant.arguments.push_back(argument.spelled());
  }
  return variant;
}

Launcher& launcher() {
  const auto* recorder = Recording::innermost();
  return recorder ? **recorder : device_launcher();
}

Launcher& device_launcher() {
  TORCH_CHECK(registered_launcher != nullptr,
              "torch_gdn: no Metal launcher is loaded; on macOS, build torch_gdn on the Mac itself; elsewhere, call "
              "mps_simulator.activate() in a checkout first");
  return *registered_launcher;
}

int64_t busy_threadgroups() { return 3 * int64_t(launcher().device().core_count); }

bool has_launcher() { return registered_launcher != nullptr; }

void set_launcher(Launcher* launcher) { registered_launcher = launcher; }

// A tracer does not count: its launches run and write their outputs.
bool is_recording() {
  const auto* recorder = Recording::innermost();
  return recorder && !dynamic_cast<const Tracer*>(recorder->get());
}

const std::string& shader_directory() { return registered_directory; }

void set_shader_directory(std::string directory) { registered_directory = std::move(directory); }

}  // namespace torch_gdn
