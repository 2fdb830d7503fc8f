#pragma once
#include <string>

namespace simulator {

// LLVM code with a call in each basic block of the shader, and a table of the blocks' operations: count/operations.h.
std::string with_counters(const std::string& intermediate_code);

}  // namespace simulator
