#include "launch/self_test.h"

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "ops/op.h"

namespace torch_gdn {

namespace {

struct Verdicts {
  std::mutex mutex;
  std::unordered_map<std::string, bool> passed;  // by op and variant
  // Those that passed, by address, once they were launched.
  std::unordered_map<const char*, std::unordered_set<LaunchKey, LaunchKeyHash>> launched;
};

// Never destroyed, because threads outlive static destructors.
Verdicts& verdicts() {
  static auto* verdicts = new Verdicts;
  return *verdicts;
}

std::atomic<bool> is_on = false;

}  // namespace

bool are_tested(Launches launches, bool unless_failed) {
  const char* op = RunningOp::name();
  if (!is_on.load(std::memory_order_relaxed) || *op == '\0' || Trusted::innermost() != nullptr) return true;
  auto& known = verdicts();
  const std::lock_guard<std::mutex> guard(known.mutex);
  auto& launched = known.launched[op];
  for (const auto& launch : launches) {
    if (launch.is_empty() || launched.contains(launch.key())) continue;
    const auto verdict = known.passed.find(std::string(op) + " " + launch.variant().name());
    if (verdict == known.passed.end() && unless_failed) continue;
    if (verdict == known.passed.end() || !verdict->second) return false;
    launched.insert(launch.key());
  }
  return true;
}

void set_self_test(bool on) {
  const std::lock_guard<std::mutex> guard(verdicts().mutex);
  verdicts().passed.clear();
  verdicts().launched.clear();
  is_on = on;
}

void set_tested(const std::vector<std::string>& names, bool passed) {
  const std::lock_guard<std::mutex> guard(verdicts().mutex);
  for (const auto& name : names) verdicts().passed[name] = passed;
}

void run_self_test(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto name = op.schema().name().substr(op.schema().name().rfind(':') + 1);
  auto& dispatcher = c10::Dispatcher::singleton();
  torch::jit::Stack argument{name};
  dispatcher.findSchemaOrThrow("gdn_self_test::define", "").callBoxed(argument);
  dispatcher.findSchemaOrThrow(("gdn_self_test::" + name).c_str(), "").callBoxed(stack);
}

}  // namespace torch_gdn
