// torch.mps.compile_shader: PyTorch's binding of its MetalShaderLibrary.
#include <ATen/native/mps/MetalShaderLibrary.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"

namespace simulator {
namespace {

using at::native::mps::DynamicMetalShaderLibrary;
using at::native::mps::MetalKernelFunction;

std::vector<uint64_t> lengths_of(const py::object& value) {
  if (py::isinstance<py::int_>(value)) return {value.cast<uint64_t>()};
  return value.cast<std::vector<uint64_t>>();
}

template <typename Value>
void append(std::vector<std::byte>& bytes, Value value) {
  const auto* first = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), first, first + sizeof(Value));
}

void append_number(std::vector<std::byte>& bytes, const py::handle& value, const std::string& cast) {
  const bool is_float = py::isinstance<py::float_>(value);
  if (cast == "fp32" || (cast.empty() && is_float)) return append(bytes, value.cast<float>());
  if (cast == "fp16") return append(bytes, c10::Half(value.cast<float>()));
  if (cast == "bf16") return append(bytes, c10::BFloat16(value.cast<float>()));
  TORCH_CHECK_TYPE(!is_float, "a float cannot be passed as ", cast);
  const auto number = value.cast<int64_t>();
  if (cast.empty() || cast == "int64" || cast == "uint64") return append(bytes, number);
  if (cast == "int32" || cast == "uint32") return append(bytes, static_cast<int32_t>(number));
  if (cast == "int16" || cast == "uint16") return append(bytes, static_cast<int16_t>(number));
  if (cast == "int8" || cast == "uint8") return append(bytes, static_cast<int8_t>(number));
  TORCH_CHECK_TYPE(false, "unsupported argument cast ", cast);
}

void set_argument(MetalKernelFunction& kernel, unsigned index, const py::handle& argument, const std::string& cast) {
  if (THPVariable_Check(argument.ptr())) return kernel.setArg(index, THPVariable_Unpack(argument.ptr()));
  std::vector<std::byte> bytes;
  if (py::isinstance<py::sequence>(argument)) {
    for (const auto& item : py::reinterpret_borrow<py::sequence>(argument)) append_number(bytes, item, cast);
  } else {
    append_number(bytes, argument, cast);
  }
  kernel.setArg(index, bytes.data(), bytes.size());
}

std::string cast_of(const py::object& casts, unsigned index) {
  if (casts.is_none()) return "";
  if (py::isinstance<py::str>(casts)) return casts.cast<std::string>();
  const auto table = casts.cast<std::map<unsigned, std::string>>();
  const auto found = table.find(index);
  return found == table.end() ? "" : found->second;
}

void launch(MetalKernelFunction& kernel, const py::args& arguments, const py::object& threads,
            const py::object& group_size, const py::object& casts, std::optional<unsigned> error_buffer) {
  std::vector<uint64_t> grid, group;
  if (!threads.is_none()) grid = lengths_of(threads);
  if (!group_size.is_none()) group = lengths_of(group_size);
  kernel.runCommandBlock([&] {
    kernel.startEncoding();
    for (unsigned i = 0; i < arguments.size(); i++) {
      set_argument(kernel, i, arguments[i], cast_of(casts, i));
      // If no grid is given, runs one thread per element of the first tensor.
      if (grid.empty() && THPVariable_Check(arguments[i].ptr()))
        grid.push_back(THPVariable_Unpack(arguments[i].ptr()).numel());
    }
    if (error_buffer) kernel.setErrorBufferIndex(*error_buffer);
    TORCH_CHECK(!grid.empty(), "threads must be given where no argument is a tensor");
    kernel.dispatch(grid, group.empty() ? c10::OptionalArrayRef<uint64_t>() : c10::OptionalArrayRef<uint64_t>(group));
  });
}

}  // namespace

void bind_shaders(py::module_& module) {
  py::class_<MetalKernelFunction, std::shared_ptr<MetalKernelFunction>>(module, "ShaderKernel")
      .def("__call__", torch::wrap_pybind_function(launch), py::arg("threads") = py::none(),
           py::arg("group_size") = py::none(), py::arg("arg_casts") = py::none(), py::arg("error_buf_idx") = py::none())
      .def_property_readonly("max_threads_per_threadgroup", &MetalKernelFunction::getMaxThreadsPerThreadgroup)
      .def_property_readonly("thread_execution_width", &MetalKernelFunction::getThreadExecutionWidth)
      .def_property_readonly("static_thread_group_memory_length",
                             &MetalKernelFunction::getStaticThreadGroupMemoryLength);
  py::class_<DynamicMetalShaderLibrary, std::shared_ptr<DynamicMetalShaderLibrary>>(module, "ShaderLibrary")
      .def("__getattr__", torch::wrap_pybind_function([](DynamicMetalShaderLibrary& library, const std::string& name) {
             return library.getKernelFunction(name);
           }))
      .def("__dir__", [](DynamicMetalShaderLibrary& library) { return library.getFunctionNames(); });
  module.def("compile_shader", torch::wrap_pybind_function([](const std::string& source) {
               return std::make_shared<DynamicMetalShaderLibrary>(source);
             }));
}

}  // namespace simulator
