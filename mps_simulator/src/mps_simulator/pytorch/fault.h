#pragma once
#include <Python.h>

namespace simulator {

void set_fault_class(PyObject* type);

}  // namespace simulator
