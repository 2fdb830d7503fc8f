#pragma once
#include <string>

namespace simulator {

// Adds a call to each basic block of the shader's LLVM code, and a table of the blocks' operations
// (count/operations.h).
std::string with_counters(const std::string& intermediate_code);

}  // namespace simulator
