#pragma once
#include <ATen/core/stack.h>

namespace c10 {
class OperatorHandle;
}

namespace simulator {

// Runs the op's CPU kernel directly on the memory of its device tensors, and moves new results to the device.
void call_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Moves a CPU result to the device. An undefined tensor stays undefined.
at::Tensor to_device(const at::Tensor& result);

}  // namespace simulator
