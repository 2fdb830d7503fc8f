// Reports misuse of a simulated object. On a Mac, misuse ends the process; here it throws an exception.
#pragma once
#include <string>

namespace simulator {

// Raises mps_simulator.Fault in Python.
[[noreturn]] void fault(const std::string& message);

// -release and -dealloc use this function. They also run while another exception unwinds the stack, and a second
// exception would then terminate the process.
void fault_unless_unwinding(const std::string& message);

// Call this in a catch clause. It passes a fault on. It turns any other exception into a fault that starts with
// `context`.
[[noreturn]] void rethrow_as_fault(const std::string& context);

}  // namespace simulator
