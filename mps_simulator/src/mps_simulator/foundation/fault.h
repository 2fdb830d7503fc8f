// Misuse of a simulated object. On a Mac it ends the process; here it is an exception.
#pragma once
#include <string>

namespace simulator {

// mps_simulator.Fault in Python.
[[noreturn]] void fault(const std::string& message);

// For -release and -dealloc, which also run while another exception unwinds, where a second one would terminate.
void fault_unless_unwinding(const std::string& message);

// In a catch clause: passes a fault on; anything else becomes a fault that starts with `context`.
[[noreturn]] void rethrow_as_fault(const std::string& context);

}  // namespace simulator
