// The Python module of the simulated device. Its public interface is mps_simulator/__init__.py.
#include "bindings.h"

#include <torch/csrc/Exceptions.h>

#include "allocator.h"
#include "fallback.h"
#include "fault.h"
#include "host_view.h"
#include "mps_simulator/engine/compile/compiler.h"
#include "mps_simulator/engine/engine.h"
#include "mps_simulator/foundation/queue.h"
#include "mps_simulator/metal/command_mode.h"
#include "mps_simulator/metal/device.h"
#include "mps_simulator/metal/simulated_mac.h"

namespace simulator {
namespace {

// Returns what was counted since `before`. The largest threadgroup memory of a dispatch is not a difference.
KernelFigures since(const KernelFigures& now, const KernelFigures& before) {
  KernelFigures difference = now;
  for (const Count& count : kCounts) difference.*count.value -= before.*count.value;
  for (size_t kind = 0; kind < kOperationKinds; ++kind) {
    difference.operations[kind] -= before.operations[kind];
    difference.operations_issued[kind] -= before.operations_issued[kind];
  }
  difference.seconds -= before.seconds;
  return difference;
}

// Omits kinds that did not occur.
std::map<std::string, uint64_t> named(const OperationFigures& figures) {
  std::map<std::string, uint64_t> result;
  for (size_t kind = 0; kind < kOperationKinds; ++kind) {
    if (figures[kind] > 0) result[kOperationNames[kind]] = figures[kind];
  }
  return result;
}

void wait_without_interpreter(std::mutex& mutex) {
  if (!PyGILState_Check()) return mutex.lock();
  const py::gil_scoped_release release;
  mutex.lock();
}

void bind_engine(py::module_& module) {
  py::class_<KernelFigures> kernel_figures(module, "KernelFigures");
  kernel_figures.def(py::init<>())
      .def("since", &since)
      .def_property_readonly("operations", [](const KernelFigures& figures) { return named(figures.operations); })
      .def_property_readonly("operations_issued",
                             [](const KernelFigures& figures) { return named(figures.operations_issued); })
      .def_readonly("threadgroup_memory", &KernelFigures::threadgroup_memory)
      .def_readonly("seconds", &KernelFigures::seconds);
  for (const Count& count : kCounts) kernel_figures.def_readonly(count.name, count.value);
  module.def("figures", &figures);
  module.def("reset_figures", &reset_figures);
  py::class_<Settings>(module, "Settings")
      .def_readwrite("watch", &Settings::watch)
      .def_readwrite("detailed", &Settings::detailed)
      .def_readwrite("perturb", &Settings::perturb)
      .def_readwrite("seed", &Settings::seed)
      .def_readwrite("workers", &Settings::workers)
      .def_readwrite("parts", &Settings::parts)
      .def_readwrite("strict", &Settings::strict)
      .def_readwrite("march", &Settings::march)
      .def_readwrite("all_lanes", &Settings::all_lanes);
  module.def("settings", &settings, py::return_value_policy::reference);
  module.def("set_directories", &set_directories);
  module.def("set_tools", &set_tools);
}

// Returns one byte for each byte of a tensor's storage: 1 if that byte was ever written.
py::bytes written_bytes(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_mps(), "written_bytes: tensor: expected one on mps, got one on ", tensor.device());
  wait_for_stream();
  std::string marks(tensor.storage().nbytes(), 0);
  const std::byte* data = marks.empty() ? nullptr : buffer_data(tensor.storage().data());
  for (size_t i = 0; i < marks.size(); ++i) marks[i] = memory_is_written(data + i, 1);
  return marks;
}

}  // namespace
}  // namespace simulator

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace simulator;
  wait_for_turn = &wait_without_interpreter;
  bind_engine(module);
  bind_shaders(module);
  bind_metal_objects(module);
  module.def("set_fault_class", [](const py::object& type) { set_fault_class(type.ptr()); });
  module.def("fallbacks", &fallbacks);
  module.def("say_what_is_loaded", &say_what_is_loaded);
  module.def("synchronize", torch::wrap_pybind_function_no_gil(&wait_for_stream));
  module.def("pending_commands", &pending_commands);
  module.def("waits", &waits);
  module.def("copies", &copies);
  module.def("written_bytes", torch::wrap_pybind_function(&written_bytes));
  module.def("total_requested", [] { return Allocator::instance().total_requested(); });
  module.def("run_at_commit", [] { return run_at_commit; });
  module.def("set_run_at_commit", [](bool yes) { run_at_commit = yes; });
  module.def("is_concurrent", [] { return is_concurrent; });
  module.def("set_concurrent", [](bool yes) { is_concurrent = yes; });
  module.attr("core_count") = kCoreCount;
  module.attr("device_name") = kDeviceName;
}
