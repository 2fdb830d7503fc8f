#pragma once

namespace simulator {

// Makes a trap that a kernel runs into a fault of that kernel. Once a process.
void handle_traps_of_kernels();

}  // namespace simulator
