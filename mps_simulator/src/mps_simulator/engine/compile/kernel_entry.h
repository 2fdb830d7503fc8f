// Describes the kernels that the source transformation finds, and generates the code of each entry point.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "tokens.h"

namespace simulator {

// One [[name(argument)]], or one part of [[a, b(c)]].
struct Attribute {
  std::string name;
  size_t argument_begin = 0, argument_end = 0;  // tokens of the argument
  std::string argument;                         // output text of the argument
  size_t at = 0;
};

// Reads all [[...]] in [begin, end) and erases them.
std::vector<Attribute> take_attributes(Tokens& tokens, size_t begin, size_t end);

struct KernelParameter {
  enum Kind { buffer, threadgroup_memory, builtin } kind = buffer;
  std::string name;
  std::string source;  // expression that the builtin is read from
  std::string gate;    // its [[function_constant]], or empty
  uint32_t index = 0;
  size_t at = 0;
  bool is_constant = false, is_const = false, is_reference = false, is_numbered = false;
};

struct Kernel {
  std::string name;
  std::string template_header;  // `template <...>`, empty for a plain function
  std::string max_threads;      // name of the function that returns it; empty if the attribute is absent
  std::vector<KernelParameter> parameters;
  std::vector<size_t> required_constants;  // indices into the program's function constants
};

std::vector<KernelParameter> take_parameters(Tokens& tokens, size_t open);

// An entry point: a kernel under one host name.
struct Entry {
  std::string host_name;
  std::string scope;  // "::a::b"
  const Kernel* kernel = nullptr;
  size_t number = 0;
};

// Returns the code to insert where the entry is declared. `callee` is f or f<a, b>; `signature` is its function type.
std::string entry_code(const Entry& entry, const std::string& callee, const std::string& signature);

}  // namespace simulator
