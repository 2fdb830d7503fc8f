#include "ops/collectives.h"

#include <torch/library.h>
#include <unistd.h>

#include <stdexcept>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace torch_gdn {
namespace {

torch::Library& library() {
  static torch::Library defined(torch::Library::FRAGMENT, "gdn_c10d", std::nullopt, __FILE__, __LINE__);
  return defined;
}

c10::OperatorHandle collective(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("c10d::" + name).c_str(), "");
}

// Returns a value whose tensors, in lists of any depth, are others with the same storage. A view would hold its base.
c10::IValue without_python(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? value.toTensor().variable_data() : value;
  if (!value.isList()) return value;
  const auto given = value.toList();
  c10::impl::GenericList copies(given.elementType());
  for (const c10::IValue& each : given) copies.push_back(without_python(each));
  return copies;
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  const size_t count = op.schema().arguments().size(), before = stack->size() - count;
  for (size_t i = before; i < stack->size(); ++i) (*stack)[i] = without_python((*stack)[i]);
  collective(name.substr(name.rfind(':') + 1)).callBoxed(*stack);
  stack->erase(stack->begin() + before, stack->end() - 1);  // the tensors, which some collectives return too
}

bool notify(const c10::intrusive_ptr<c10d::Work>& work, int64_t pipe, int64_t call) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    future = work->getFuture();
  } catch (const c10::Error&) {  // send and recv have none
    return false;
  }
  future->addCallback([pipe, call](c10::ivalue::Future&) {
    [[maybe_unused]] const auto written = ::write(static_cast<int>(pipe), &call, sizeof call);
  });
  return true;
}

// Python's exceptions can be raised once, and a future's error can be asked for often.
void set_error(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto what = torch::jit::pop(*stack).toStringRef();
  torch::jit::pop(*stack).toFuture()->setErrorIfNeeded(std::make_exception_ptr(std::runtime_error(what)));
}

}  // namespace

void define_collective(const std::string& name) {
  const auto& schema = collective(name).schema();
  library().def(c10::FunctionSchema("gdn_c10d::" + name, "", schema.arguments(), {schema.returns().back()}));
  library().impl(name.c_str(), torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd,
                                               torch::CppFunction::makeFromBoxedFunction<&run>()));
}

void define_work() {
  library().def("notify", &notify);
  library().def("set_error(Future(t) future, str what) -> ()",
                torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd,
                                torch::CppFunction::makeFromBoxedFunction<&set_error>()));
}

}  // namespace torch_gdn
