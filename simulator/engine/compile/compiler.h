// simulator::compile (engine.h): Metal source -> C++ for OpenCL -> a shared library in this process.
#pragma once
#include <string>

namespace simulator {

// The folder that holds metal/ and kernel_abi.h: simulator/engine of the checkout. To be set before the first compile.
void set_engine_directory(std::string directory);
std::string engine_directory();

}  // namespace simulator
