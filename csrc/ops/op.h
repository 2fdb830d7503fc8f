// An op's contract is a struct template in ops/<family>/. Its parameter is the integer type of sizes: int64_t
// when the op runs, and SymInt when torch.compile asks for its outputs.
//   kSchema      the schema that torch.library reads
//   arguments()  a tie of its members in the schema's order
//   check(op)    raises errors for wrong arguments, which name the op, and derives the sizes
//   outputs()    allocates the results
// A device adds void run(const Op<int64_t>&, const outputs&). The CPU's file defines the op, and Metal's file
// implements it.
#pragma once
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <tuple>

#include "ops/arguments.h"
#include "ops/check.h"

namespace torch_gdn {

template <typename Int>
Tensor empty(c10::ArrayRef<Int> sizes, const at::TensorOptions& options) {
  if constexpr (is_run<Int>) {
    return at::empty(sizes, options);
  } else {
    return at::empty_symint(sizes, options);
  }
}

template <typename Int>
Tensor empty(std::initializer_list<Int> sizes, const at::TensorOptions& options) {
  return empty(c10::ArrayRef<Int>(sizes.begin(), sizes.size()), options);
}

// Returns the optional member, created if empty, for an op that requires it.
inline Tensor& required(optional<Tensor>& member) { return member.has_value() ? *member : member.emplace(); }

// Returns an output, which has no elements if it was not requested.
template <typename Int>
Tensor empty_if(bool is_requested, c10::ArrayRef<Int> sizes, const at::TensorOptions& options) {
  return is_requested ? empty(sizes, options) : at::empty({0}, options);
}

template <typename Int>
Tensor empty_if(bool is_requested, std::initializer_list<Int> sizes, const at::TensorOptions& options) {
  return empty_if(is_requested, c10::ArrayRef<Int>(sizes.begin(), sizes.size()), options);
}

template <template <typename> class Op>
std::string name_of() {
  const std::string schema = Op<int64_t>::kSchema;
  return schema.substr(0, schema.find('('));
}

template <typename F, typename Outputs>
void for_each_output(const Outputs& outputs, const F& f) {
  if constexpr (std::is_same_v<Outputs, Tensor>) {
    f(outputs);
  } else {
    std::apply([&](const auto&... each) { (f(each), ...); }, outputs);
  }
}

template <template <typename> class Op>
using OutputsOf = decltype(std::declval<const Op<int64_t>&>().outputs());

// What a device's function takes: the op itself, or the base class that its ops name Shared.
template <typename Op>
struct RunArgument {
  using Type = Op;
};

template <typename Op>
  requires requires { typename Op::Shared; }
struct RunArgument<Op> {
  using Type = typename Op::Shared;
};

template <typename Op, typename Outputs>
struct Runs {
  using Function = void(const Op&, const Outputs&);
};

template <typename Op>
struct Runs<Op, void> {
  using Function = void(const Op&);
};

// A device's function for an op. The functions of several ops may share a name, because each takes its own op.
template <template <typename> class Op>
using Run = typename Runs<typename RunArgument<Op<int64_t>>::Type, OutputsOf<Op>>::Function*;

// The op that the calling thread runs. Kernels put its name into their errors. Autocast does not reach the products
// that a kernel leaves to PyTorch.
class RunningOp {
 public:
  explicit RunningOp(const char* name);
  ~RunningOp();
  RunningOp(const RunningOp&) = delete;
  static const char* name();

 private:
  const char* outer_;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

namespace detail {

template <typename... Argument>
void read_stack(const torch::jit::Stack& stack, std::tuple<Argument&...> arguments) {
  const auto values = torch::jit::last(stack, sizeof...(Argument));
  std::apply([&, i = size_t(0)](Argument&... each) mutable { ((each = values[i++].to<Argument>()), ...); }, arguments);
}

// The function of an op for the dispatcher, whose callers all have their arguments on a stack already. `prepare` sees
// each output before `run` does.
template <template <typename> class Op, Run<Op> run, auto prepare>
void run_on_stack(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static const auto name = name_of<Op>();
  const auto& schema = handle.schema();
  Op<int64_t> op;
  read_stack(*stack, op.arguments());
  check_required(name.c_str(), schema, tensors_of(op.arguments(), true));
  const auto tensors = tensors_of(op.arguments(), false);
  check_memory(name.c_str(), schema, tensors);
  op.check(name.c_str());
  check_written(name.c_str(), schema, tensors);
  const RunningOp running(name.c_str());
  if constexpr (std::is_void_v<OutputsOf<Op>>) {
    run(op);
    torch::jit::drop(*stack, schema.arguments().size());
  } else {
    const auto outputs = op.outputs();
    for_each_output(outputs, prepare);
    run(op, outputs);
    torch::jit::drop(*stack, schema.arguments().size());
    for_each_output(outputs, [&](const Tensor& output) { stack->emplace_back(output); });
  }
}

// Checks a call and replaces its arguments by empty outputs. Fake tensors give fake outputs.
template <template <typename> class Op>
void infer(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Op<c10::SymInt> op;
  read_stack(*stack, op.arguments());
  static const auto name = name_of<Op>();
  op.check(name.c_str());
  torch::jit::drop(*stack, handle.schema().arguments().size());
  if constexpr (!std::is_void_v<OutputsOf<Op>>) {
    for_each_output(op.outputs(), [&](const Tensor& output) { stack->emplace_back(output); });
  }
}

}  // namespace detail

template <template <typename> class Op, Run<Op> run, auto prepare>
void implement(torch::Library& m, c10::DispatchKey device) {
  constexpr auto kernel = &detail::run_on_stack<Op, run, prepare>;
  m.impl(name_of<Op>().c_str(), torch::dispatch(device, torch::CppFunction::makeFromBoxedFunction<kernel>()));
}

// The names of all ops. gdn_infer::<name> infers an op's outputs, and Python registers it as the op's fake kernel.
std::set<std::string>& op_names();
void define_inference(const std::string& name, const char* schema, torch::CppFunction&& infer);

// Registers autograd and lazy views.
void implement_on_every_device(torch::Library& m, const char* op);

template <template <typename> class Op>
void define(torch::Library& m) {
  const auto name = name_of<Op>();
  m.def(Op<int64_t>::kSchema, {at::Tag::pt2_compliant_tag});
  implement_on_every_device(m, name.c_str());
  define_inference(name, Op<int64_t>::kSchema, torch::CppFunction::makeFromBoxedFunction<&detail::infer<Op>>());
}

}  // namespace torch_gdn
