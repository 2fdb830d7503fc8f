#pragma once

namespace simulator {

// Turns a trap in a kernel into a fault of that kernel. Call this once per process.
void handle_traps_of_kernels();

}  // namespace simulator
