// Defines a launcher that does nothing. For each op of torch.ops.gdn it also defines one of the same schema in
// torch.ops.gdn_nothing, which only allocates an output.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "launch/launch.h"

namespace {

using namespace torch_gdn;

class NoLauncher final : public Launcher {
 public:
  explicit NoLauncher(Launcher& device) : device_(device) {}
  Launcher& real() { return device_; }
  void run(Launches) override {}
  std::vector<PipelineFacts> compile(c10::ArrayRef<Variant> variants) override { return device_.compile(variants); }
  std::vector<PipelineFacts> pipelines() const override { return device_.pipelines(); }
  void clear_pipelines() override { device_.clear_pipelines(); }
  const DeviceFacts& device() const override { return device_.device(); }
  double wait_and_time() override { return device_.wait_and_time(); }

 private:
  Launcher& device_;
};

NoLauncher& no_launcher() {
  static NoLauncher launcher(device_launcher());
  return launcher;
}

// A written argument is an output that already exists.
void allocate(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const at::Tensor x = torch::jit::peek(*stack, 0, schema.arguments().size()).toTensor();
  torch::jit::drop(*stack, schema.arguments().size());
  const bool in_place = schema.is_mutable();
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    stack->emplace_back(i == 0 && !in_place ? at::empty(x.sizes(), x.options()) : at::empty({0}, x.options()));
  }
}

void define_ops(torch::Library& m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    constexpr std::string_view space = "gdn::";
    if (!name.name.starts_with(space)) continue;
    const std::string schema = toString(dispatcher.findSchema(name)->schema()).substr(space.size());
    m.def(schema.c_str());
    m.impl(name.name.substr(space.size()).c_str(), torch::CppFunction::makeFromBoxedFunction<&allocate>());
  }
}

TORCH_LIBRARY(gdn_nothing, m) {
  define_ops(m);
  m.def("start() -> ()", [] { set_launcher(&no_launcher()); });
  m.def("stop() -> ()", [] { set_launcher(&no_launcher().real()); });
}

}  // namespace
