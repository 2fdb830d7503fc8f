#include "cpu_call.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "host_view.h"
#include "mps_simulator/metal/device.h"

namespace simulator {

at::Tensor to_device(const at::Tensor& result) {
  if (!result.defined() || result.is_mps()) return result;
  at::Tensor moved = at::empty_like(result, result.options().device(at::kMPS));
  copy_between(result, moved, false);
  return moved;
}

namespace {

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// Returns a CPU tensor for a device tensor. The tensor for an out= argument owns its memory, because the op may resize
// it.
at::Tensor cpu_tensor(const at::Tensor& tensor, bool is_out) {
  if (!tensor.defined() || !tensor.is_mps()) return tensor;
  return is_out ? at::empty({0}, tensor.options().device(at::kCPU)) : host_view(tensor);
}

c10::IValue cpu_tensor(const c10::IValue& value, bool is_out) {
  if (value.isTensor()) return cpu_tensor(value.toTensor(), is_out);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(cpu_tensor(tensor, is_out));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional(cpu_tensor(*tensor, is_out)) : std::nullopt);
    return list;
  }
  if (value.isDevice()) return c10::Device(at::kCPU);
  return value;
}

// Runs after the op. Tells the watch what the op wrote, or copies it to the out= tensor.
void take_written(const at::Tensor& original, const at::Tensor& used, bool is_out) {
  if (!original.defined() || !original.is_mps()) return;
  if (!is_out) return report_written(used);
  if (original.sizes() != used.sizes()) original.resize_(used.sizes());
  copy_between(used, original, false);
}

void take_written(const c10::IValue& original, const c10::IValue& used, bool is_out) {
  if (original.isTensor()) return take_written(original.toTensor(), used.toTensor(), is_out);
  if (!original.isTensorList()) return;
  const auto originals = original.toTensorVector(), all_used = used.toTensorVector();
  for (size_t i = 0; i < originals.size(); i++) take_written(originals[i], all_used[i], is_out);
}

c10::IValue result_on_device(const c10::IValue& value) {
  if (value.isTensor()) return to_device(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(to_device(tensor));
    return list;
  }
  return value;
}

// Returns the argument that a result aliases according to the schema, or null if the result is new.
const c10::IValue* argument_returned(const c10::FunctionSchema& schema, const c10::Argument& result,
                                     const std::vector<c10::IValue>& arguments) {
  if (!is_written(result)) return nullptr;
  for (size_t i = 0; i < arguments.size(); i++) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    if (alias && alias->afterSets() == result.alias_info()->afterSets()) return &arguments[i];
  }
  return nullptr;
}

}  // namespace

void call_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const auto& parameters = schema.arguments();
  const auto last = torch::jit::last(*stack, parameters.size());
  const std::vector<c10::IValue> arguments(last.begin(), last.end());
  torch::jit::drop(*stack, parameters.size());
  auto is_out = [&](size_t i) { return is_written(parameters[i]) && parameters[i].kwarg_only(); };

  wait_for_stream();
  std::vector<c10::IValue> used;
  for (size_t i = 0; i < arguments.size(); i++) used.push_back(cpu_tensor(arguments[i], is_out(i)));
  torch::jit::Stack results = used;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results);

  for (size_t i = 0; i < arguments.size(); i++)
    if (is_written(parameters[i])) take_written(arguments[i], used[i], is_out(i));
  for (size_t i = 0; i < results.size(); i++) {
    const c10::IValue* same = argument_returned(schema, schema.returns()[i], arguments);
    stack->push_back(same ? *same : result_on_device(results[i]));
  }
}

}  // namespace simulator
