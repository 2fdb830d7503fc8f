#pragma once
#include <torch/csrc/utils/pybind.h>

namespace simulator {

void bind_shaders(py::module_& module);
void bind_metal_objects(py::module_& module);

}  // namespace simulator
