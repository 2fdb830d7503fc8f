// simulator::compile (engine.h) turns Metal source into C++ for OpenCL, and that into a shared library in this process.
#pragma once
#include <string>

namespace simulator {

// `engine` is the folder mps_simulator/engine, whose compile/metal holds the language's headers. `cache` is created if
// it does not exist. Call this before the first compile.
void set_directories(const std::string& engine, const std::string& cache);

// Sets the paths of the clang++ and the linker that make kernels, and of GCC's folder, which holds libgcc. Call this
// before the first compile.
void set_tools(const std::string& clang, const std::string& linker, const std::string& gcc);

}  // namespace simulator
