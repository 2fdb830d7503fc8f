#pragma once

namespace simulator {

// Makes a trap in a kernel a fault of that kernel. Call this once per process.
void handle_traps_of_kernels();

}  // namespace simulator
