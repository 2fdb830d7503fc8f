// What all of torch.ops.gdn share: autograd (they are forward only), and their outputs for fake tensors.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include "ops/op.h"

namespace torch_gdn {

namespace {

// Raises where an input needs a gradient; else redispatches below autograd. Mutated tensors get a new version, so that
// autograd refuses them where they were saved.
void forward_only(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  if (at::GradMode::is_enabled()) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      TORCH_CHECK(!values[i].isTensor() || !values[i].toTensor().requires_grad(), op.schema().name(), ": ",
                  arguments[i].name(), ": expected a tensor that does not require grad (the op has no backward; use ",
                  "torch.no_grad() or detach()), got one that does");
    }
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias == nullptr || !alias->isWrite() || !values[i].isTensor() || values[i].toTensor().is_inference()) continue;
    values[i].toTensor().unsafeGetTensorImpl()->bump_version();
  }
  const at::AutoDispatchBelowAutograd below_autograd;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace

std::map<std::string, Infer>& inferences() {
  static std::map<std::string, Infer> inferences;
  return inferences;
}

torch::CppFunction autograd_kernel() {
  return torch::dispatch(c10::DispatchKey::Autograd, torch::CppFunction::makeFromBoxedFunction<&forward_only>());
}

}  // namespace torch_gdn
