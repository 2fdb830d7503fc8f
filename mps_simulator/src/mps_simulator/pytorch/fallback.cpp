// Handles ops that have no Metal kernel here. aten's ops run on the CPU. All other ops raise an error, as on a Mac.
#include "fallback.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <cmath>
#include <mutex>

#include "cpu_call.h"
#include "generator.h"
#include "host_view.h"
#include "mps_simulator/metal/device.h"

namespace simulator {
namespace {

std::mutex count_mutex;

std::map<std::string, uint64_t>& counts() {
  static auto* map = new std::map<std::string, uint64_t>;
  return *map;
}

std::string& what_is_loaded() {
  static auto* text = new std::string;
  return *text;
}

// Lends the mps generator's engine to CPU code that draws from the CPU's default generator.
class DefaultEngineScope {
 public:
  DefaultEngineScope() : cpu_(at::detail::getDefaultCPUGenerator()), engine_(cpu_engine(default_generator())) {
    saved_ = cpu_.get_state();
    cpu_.set_state(engine_.get_state());
  }
  ~DefaultEngineScope() {
    engine_.set_state(cpu_.get_state());
    cpu_.set_state(saved_);
  }

 private:
  at::Generator cpu_, engine_;
  at::Tensor saved_;
};

// Replaces the op's generator by a CPU engine. Returns false if the op takes no generator.
bool use_cpu_engine(const c10::FunctionSchema& schema, torch::jit::Stack* stack) {
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    if (arguments[i].name() != "generator") continue;
    c10::IValue& value = (*stack)[stack->size() - arguments.size() + i];
    value = cpu_engine(value.isGenerator() ? value.toGenerator() : default_generator());
    return true;
  }
  return false;
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string name = toString(op.operator_name());
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.operator_name().getNamespace() == "aten", "The operator '", name,
      "' is not currently implemented for the MPS device. The simulated device falls back to the CPU for aten's "
      "operators alone. ",
      what_is_loaded());
  count_fallback(name);
  if (!use_cpu_engine(op.schema(), stack) && op.hasTag(at::Tag::nondeterministic_seeded)) {
    const DefaultEngineScope scope;
    return call_on_cpu(op, stack);
  }
  call_on_cpu(op, stack);
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  count_fallback("aten::convolution_overrideable");
  wait_for_stream();
  const auto cpu_bias = bias && bias->defined() ? std::optional(host_view(*bias)) : std::nullopt;
  return to_device(at::convolution(host_view(input), host_view(weight), cpu_bias, stride, padding, dilation, transposed,
                                   output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& grad, const at::Tensor& input,
                                                                    const at::Tensor& weight, at::IntArrayRef stride,
                                                                    at::IntArrayRef padding, at::IntArrayRef dilation,
                                                                    bool transposed, at::IntArrayRef output_padding,
                                                                    int64_t groups, std::array<bool, 3> mask) {
  count_fallback("aten::convolution_backward_overrideable");
  wait_for_stream();
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  auto [input_grad, weight_grad, bias_grad] = at::convolution_backward(
      host_view(grad), host_view(input), host_view(weight), at::OptionalIntArrayRef(at::IntArrayRef(channels)), stride,
      padding, dilation, transposed, output_padding, groups, mask);
  return {to_device(input_grad), to_device(weight_grad), to_device(bias_grad)};
}

// The composite op looks up a kernel in a table that has no entry for mps in the CPU build. The plain form of the op
// replaces it, as on a Mac in inference.
at::Tensor scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                        const std::optional<at::Tensor>& mask, double dropout, bool causal,
                                        std::optional<double> scale, bool enable_gqa) {
  std::optional<at::Tensor> bias = mask;
  if (mask && mask->defined() && mask->scalar_type() == at::kBool)
    bias = at::zeros_like(*mask, query.options().requires_grad(false)).masked_fill(mask->logical_not(), -INFINITY);
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, bias, dropout, causal, std::nullopt,
                                                            scale, enable_gqa));
}

TORCH_LIBRARY_IMPL(_, MPS, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("scaled_dot_product_attention", scaled_dot_product_attention);
}

TORCH_LIBRARY_IMPL(aten, AutogradMPS, m) { m.impl("scaled_dot_product_attention", scaled_dot_product_attention); }

}  // namespace

void count_fallback(const std::string& op) {
  std::lock_guard lock(count_mutex);
  counts()[op]++;
}

void say_what_is_loaded(const std::string& text) { what_is_loaded() = text; }

std::map<std::string, uint64_t> fallbacks() {
  std::lock_guard lock(count_mutex);
  return counts();
}

}  // namespace simulator
