// The kinds of scalar operations in a shader. operations.h says how they are counted.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>

namespace simulator {

enum OperationKind : uint32_t {
  operation_fma,
  operation_add,  // additions and subtractions
  operation_mul,
  operation_div,
  operation_minmax,
  operation_round,
  operation_exp,  // exp, exp2 and exp10; logarithms are grouped in the same way
  operation_log,
  operation_sqrt,
  operation_rsqrt,
  operation_other,  // other functions: sin, tanh, pow, ...
  operation_convert,
  operation_compare,
  operation_select,
  operation_integer,
};
inline constexpr const char* kOperationNames[] = {"fma",   "add",     "mul",     "div",    "minmax",
                                                  "round", "exp",     "log",     "sqrt",   "rsqrt",
                                                  "other", "convert", "compare", "select", "integer"};
inline constexpr size_t kOperationKinds = std::size(kOperationNames);
typedef std::array<uint64_t, kOperationKinds> OperationFigures;
typedef std::array<uint32_t, kOperationKinds> BlockOperations;  // operations of one execution of a basic block

}  // namespace simulator
