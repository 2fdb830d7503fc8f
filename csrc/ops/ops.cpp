// Schemas of torch.ops.gdn, and autograd: the ops are forward only.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include "ops/aura/aura_attention.h"
#include "ops/aura/aura_decode.h"
#include "ops/aura/aura_encode.h"
#include "ops/aura/aura_flash_p1.h"
#include "ops/aura/aura_flash_p2.h"
#include "ops/aura/aura_rotate.h"
#include "ops/gdn/chunk_fwd_h.h"
#include "ops/gdn/chunk_fwd_o.h"
#include "ops/gdn/chunk_gated_delta_rule.h"
#include "ops/gdn/chunk_local_cumsum.h"
#include "ops/gdn/chunk_scaled_dot_kkt.h"
#include "ops/gdn/fused_recurrent_gated_delta_rule.h"
#include "ops/gdn/recompute_w_u.h"
#include "ops/gdn/solve_tril.h"
#include "ops/layers/causal_conv1d.h"
#include "ops/layers/gdn_gating.h"
#include "ops/layers/l2norm.h"
#include "ops/layers/rms_norm_gated.h"

namespace torch_gdn {

namespace {

using torch::jit::Stack;

bool is_written(const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  return alias != nullptr && alias->isWrite();
}

std::string without_namespace(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return name.substr(name.rfind(':') + 1);
}

bool is_strided(const Tensor& x) { return x.layout() == at::kStrided && !x.is_quantized() && !x.is_nested(); }

// Raises where an input needs a gradient or is not dense; else redispatches below autograd. Mutated tensors get a new
// version, so that autograd refuses them where they were saved.
void forward_only(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
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
    const Tensor x = values[i].isTensor() ? values[i].toTensor() : Tensor();
    TORCH_CHECK_NOT_IMPLEMENTED(!x.defined() || is_strided(x), op.schema().name(), ": ", arguments[i].name(),
                                ": expected a dense tensor, got one of layout ", x.layout(), " and dtype ", x.dtype());
    if (!is_written(arguments[i]) || !values[i].isTensor() || values[i].toTensor().is_inference()) continue;
    values[i].toTensor().unsafeGetTensorImpl()->bump_version();
  }
  const at::AutoDispatchBelowAutograd below_autograd;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// What a view is that has other values than its memory; else nullptr.
const char* lazy_view(const Tensor& x) {
  return x._is_zerotensor() ? "a zero tensor without memory"
         : x.is_conj()      ? "a conjugated view"
         : x.is_neg()       ? "a negated view"
                            : nullptr;
}

// Kernels read memory: views that are yet to be negated or conjugated are computed, and refused where they are written.
void resolve_lazy_views(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
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

template <typename... Argument>
void read_stack(const Stack& stack, std::tuple<Argument&...> arguments) {
  const auto values = torch::jit::last(stack, sizeof...(Argument));
  std::apply([&, i = size_t(0)](Argument&... each) mutable { ((each = values[i++].to<Argument>()), ...); }, arguments);
}

template <template <typename> class Op>
void infer(Stack& stack) {
  Op<c10::SymInt> op;
  read_stack(stack, op.arguments());
  op.check();
  stack.clear();
  if constexpr (!std::is_void_v<decltype(op.outputs())>) {
    for_each_output(op.outputs(), [&](const Tensor& output) { stack.emplace_back(output); });
  }
}

std::map<std::string, Infer>& registered_inferences() {
  static std::map<std::string, Infer> inferences;
  return inferences;
}

template <template <typename> class Op>
void define(torch::Library& m) {
  const auto name = name_of<Op>();
  m.def(Op<int64_t>::kSchema, {at::Tag::pt2_compliant_tag});
  m.impl(name.c_str(),
         torch::dispatch(c10::DispatchKey::Autograd, torch::CppFunction::makeFromBoxedFunction<&forward_only>()));
  for (const auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor}) {
    m.impl(name.c_str(), torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&resolve_lazy_views>()));
  }
  registered_inferences()[name] = &infer<Op>;
}

}  // namespace

const std::map<std::string, Infer>& inferences() { return registered_inferences(); }

TORCH_LIBRARY(gdn, m) {
  define<ChunkGatedDeltaRule>(m);
  define<ChunkGatedDeltaRuleInPlace>(m);
  define<FusedRecurrentGatedDeltaRule>(m);
  define<FusedRecurrentGatedDeltaRuleInPlace>(m);
  define<ChunkLocalCumsum>(m);
  define<ChunkScaledDotKkt>(m);
  define<SolveTril>(m);
  define<RecomputeWU>(m);
  define<ChunkFwdH>(m);
  define<ChunkFwdO>(m);

  define<L2Norm>(m);
  define<GdnGating>(m);
  define<RmsNormGated>(m);
  define<CausalConv1d>(m);
  define<CausalConv1dUpdate>(m);

  define<AuraEncode>(m);
  define<AuraEncodeInPlace>(m);
  define<AuraDecode>(m);
  define<AuraRotate>(m);
  define<AuraFlashP1>(m);
  define<AuraFlashP2>(m);
  define<AuraAttention>(m);
}

}  // namespace torch_gdn
