// All ops of torch.ops.gdn share this code. It refuses gradients, because the ops are forward only, and makes outputs
// for fake tensors.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "ops/op.h"

namespace torch_gdn {

namespace {

std::string without_namespace(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return name.substr(name.rfind(':') + 1);
}

bool is_strided(const Tensor& x) { return x.layout() == at::kStrided && !x.is_quantized() && !x.is_nested(); }

// Raises an error if an input needs a gradient, has a tangent, or is not dense. Otherwise it redispatches below
// autograd. Mutated tensors get a new version, so that autograd refuses them if it saved them.
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
    if (!values[i].isTensor()) continue;
    const Tensor& x = values[i].toTensor();
    if (!x.defined()) continue;
    // The last sentence is PyTorch's own for an op without a formula.
    TORCH_CHECK_NOT_IMPLEMENTED(!x._fw_grad(/*level=*/0).defined(), op.schema().name(), ": ", arguments[i].name(),
                                ": expected a tensor without a tangent, got one with a tangent. Trying to use ",
                                "forward AD with ", op.schema().name(), " that does not support it.");
    TORCH_CHECK_NOT_IMPLEMENTED(is_strided(x), op.schema().name(), ": ", arguments[i].name(),
                                ": expected a dense tensor, got one of layout ", x.layout(), " and dtype ", x.dtype());
    if (is_written(arguments[i]) && !x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
  }
  const at::AutoDispatchBelowAutograd below_autograd;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// Describes a view whose values differ from its memory. Returns nullptr for any other tensor.
const char* lazy_view(const Tensor& x) {
  return x._is_zerotensor() ? "a zero tensor without memory"
         : x.is_conj()      ? "a conjugated view"
         : x.is_neg()       ? "a negated view"
                            : nullptr;
}

// Kernels read memory. If the negation or conjugation of an input is still pending, it is therefore computed first. A
// written argument with a pending one is refused.
void resolve_lazy_views(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = torch::jit::peek(*stack, i, arguments.size());
    const char* view = value.isTensor() && value.toTensor().defined() ? lazy_view(value.toTensor()) : nullptr;
    if (view == nullptr) continue;
    TORCH_CHECK_VALUE(!is_written(arguments[i]), without_namespace(op), ": ", arguments[i].name(),
                      ": expected a tensor that can be written in place, got ", view);
    value = value.toTensor().clone();
  }
  constexpr c10::DispatchKeySet lazy(
      {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  op.redispatchBoxed(keys - lazy, stack);
}

}  // namespace

static thread_local const char* running_op = "";

RunningOp::RunningOp(const char* name) : outer_(std::exchange(running_op, name)) {}
RunningOp::~RunningOp() { running_op = outer_; }
const char* RunningOp::name() { return running_op; }

std::set<std::string>& op_names() {
  static std::set<std::string> names;
  return names;
}

// FakeTensorMode runs the C++ kernel of a composite op with its fake tensors.
void define_inference(const std::string& name, const char* schema, torch::CppFunction&& infer) {
  static torch::Library library(torch::Library::FRAGMENT, "gdn_infer", std::nullopt, __FILE__, __LINE__);
  library.def(schema);
  library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, std::move(infer)));
  op_names().insert(name);
}

void implement_on_every_device(torch::Library& m, const char* op) {
  m.impl(op, torch::dispatch(c10::DispatchKey::Autograd, torch::CppFunction::makeFromBoxedFunction<&forward_only>()));
  for (const auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor}) {
    m.impl(op, torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&resolve_lazy_views>()));
  }
}

}  // namespace torch_gdn
