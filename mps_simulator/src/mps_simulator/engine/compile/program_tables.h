// Generates the tables of kernel_abi.h, which are appended to a program.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "kernel_entry.h"

namespace simulator {

// A program-scope `constant T name [[function_constant(index)]]`.
struct FunctionConstant {
  std::string name;
  std::string scope;  // "::a::b"
  uint32_t index = 0;
};

// `initialisers` names functions to call after function constants have changed.
std::string program_tables(const std::vector<Entry>& entries, const std::vector<FunctionConstant>& constants,
                           const std::vector<std::string>& initialisers);

}  // namespace simulator
