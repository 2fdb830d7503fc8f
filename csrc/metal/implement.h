// Implements an op on Metal. Use implement<Op, run>(m) in TORCH_LIBRARY_IMPL(gdn, MPS, m).
#pragma once
#include "launch/self_test.h"
#include "metal/parameters.h"
#include "ops/op.h"

namespace torch_gdn::metal {

// Under a recorder, no kernel writes the outputs. Zeros keep a model's forward pass finite.
inline void prepare_output(const Tensor& output) {
  if (is_recording()) output.zero_();
}

// Runs the op, or passes the call to the self-test if the op never launched one of the variants.
template <c10::BoxedKernel::BoxedKernelFunction_withDispatchKeys* run>
void run_or_test(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  try {
    return run(op, keys, stack);  // leaves the arguments on the stack if it throws
  } catch (const Untested&) {
  }
  run_self_test(op, stack);
}

template <template <typename> class Op, Run<Op> run>
void implement(torch::Library& m) {
  constexpr auto kernel = &run_or_test<&detail::run_on_stack<Op, run, &prepare_output>>;
  m.impl(name_of<Op>().c_str(),
         torch::dispatch(c10::DispatchKey::MPS, torch::CppFunction::makeFromBoxedFunction<kernel>()));
}

}  // namespace torch_gdn::metal
