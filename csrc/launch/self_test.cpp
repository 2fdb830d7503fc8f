#include "launch/self_test.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "launch/launch_key.h"
#include "ops/op.h"

namespace torch_gdn {

namespace {

struct Verdicts {
  std::mutex mutex;
  std::shared_ptr<const SelfTest> test;
  std::map<std::pair<std::string, std::string>, bool> passed;  // by op and variant
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
    const LaunchKey key{launch.kernel, launch.arguments};
    if (launch.is_empty() || launched.contains(key)) continue;
    const auto verdict = known.passed.find({op, launch.variant().name()});
    if (verdict == known.passed.end() && unless_failed) continue;
    if (verdict == known.passed.end() || !verdict->second) return false;
    launched.insert(key);
  }
  return true;
}

void set_self_test(SelfTest test) {
  const std::lock_guard<std::mutex> guard(verdicts().mutex);
  is_on = bool(test);
  verdicts().test = std::make_shared<const SelfTest>(std::move(test));
}

void set_tested(const std::string& op, const std::vector<std::string>& variants, bool passed) {
  const std::lock_guard<std::mutex> guard(verdicts().mutex);
  for (const auto& each : variants) verdicts().passed[{op, each}] = passed;
}

void clear_tested() {
  const std::lock_guard<std::mutex> guard(verdicts().mutex);
  verdicts().passed.clear();
  verdicts().launched.clear();
}

bool run_self_test(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::shared_ptr<const SelfTest> test;
  {
    const std::lock_guard<std::mutex> guard(verdicts().mutex);
    test = verdicts().test;
  }
  const auto name = op.schema().name().substr(op.schema().name().rfind(':') + 1);
  if (!test || !*test || !(*test)(name)) return false;
  c10::Dispatcher::singleton().findSchemaOrThrow(("gdn_self_test::" + name).c_str(), "").callBoxed(stack);
  return true;
}

}  // namespace torch_gdn
