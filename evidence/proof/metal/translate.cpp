// Translates preprocessed Metal on standard input to the C++ for OpenCL that clang compiles, on standard output. The
// translation is the simulated device's own, for language version 3.1.
#include <iostream>
#include <iterator>
#include <string>

#include "mps_simulator/engine/compile/source_transform.h"
#include "mps_simulator/engine/engine.h"

int main() {
  const std::string source{std::istreambuf_iterator<char>(std::cin), {}};
  try {
    std::cout << simulator::transform_source(source, 3u << 16 | 1);
  } catch (const simulator::CompileError& error) {
    std::cerr << error.what();
    return 1;
  }
}
