// PyTorch's bindings turn these exceptions into the Python class mps_simulator.Fault.
#include "fault.h"

#include <torch/csrc/Exceptions.h>

#include "mps_simulator/foundation/fault.h"

namespace simulator {
namespace {

PyObject* fault_class = nullptr;

// This class derives from PyTorch's error, and not from the engine's too. Two paths to std::exception would hide it
// from handlers of std::exception.
struct DeviceFault final : torch::PyTorchError {
  using torch::PyTorchError::PyTorchError;
  PyObject* python_type() override { return fault_class ? fault_class : PyExc_RuntimeError; }
};

}  // namespace

void set_fault_class(PyObject* type) {
  Py_INCREF(type);
  fault_class = type;
}

void fault(const std::string& message) { throw DeviceFault(message); }

void fault_unless_unwinding(const std::string& message) {
  if (std::uncaught_exceptions() == 0) fault(message);
}

void rethrow_as_fault(const std::string& context) {
  try {
    throw;
  } catch (const DeviceFault&) {
    throw;
  } catch (const std::exception& exception) {
    fault(context + exception.what());
  }
}

}  // namespace simulator
