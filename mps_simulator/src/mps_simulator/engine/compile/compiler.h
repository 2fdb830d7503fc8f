// simulator::compile (engine.h) turns Metal source into C++ for OpenCL, compiles that to a shared library, and loads it
// into this process.
#pragma once
#include <string>

namespace simulator {

// `engine` is the folder mps_simulator/engine; its folder compile/metal holds the language's headers. `cache` is
// created if it does not exist. Call this before the first compile.
void set_directories(const std::string& engine, const std::string& cache);

// Sets the paths of the clang++ and the linker that build kernels, and of the GCC folder that holds libgcc. Call this
// before the first compile.
void set_tools(const std::string& clang, const std::string& linker, const std::string& gcc);

}  // namespace simulator
