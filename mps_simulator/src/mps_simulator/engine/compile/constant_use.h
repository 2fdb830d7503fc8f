// Finds the function constants that a kernel depends on, directly or through the names that it uses.
#pragma once
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tokens.h"

namespace simulator {

class ConstantUse {
 public:
  // Says that tokens [begin, end) define `name`, which is a function, a class or a variable.
  void define(const std::string& name, size_t begin, size_t end) { definitions_.emplace(name, std::pair{begin, end}); }

  // Returns the members of `constants` that the definitions of `name` use, directly or indirectly. A constant that the
  // program only tests with is_function_constant_defined() need not have a value.
  std::set<std::string> required(const Tokens& tokens, const std::string& name,
                                 const std::set<std::string>& constants) const;

 private:
  std::multimap<std::string, std::pair<size_t, size_t>> definitions_;
};

}  // namespace simulator
