// Misuse of a simulated object. On a Mac it ends the process; here it is an exception.
#pragma once
#include <string>

namespace simulator {

// Raises mps_simulator.Fault in Python.
[[noreturn]] void fault(const std::string& message);

// -release and -dealloc use this. They also run while another exception unwinds, and a second exception would terminate
// the process.
void fault_unless_unwinding(const std::string& message);

// Call this in a catch clause. It passes a fault on, and turns anything else into a fault that starts with `context`.
[[noreturn]] void rethrow_as_fault(const std::string& context);

}  // namespace simulator
