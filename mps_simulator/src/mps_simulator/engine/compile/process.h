#pragma once
#include <string>
#include <vector>

namespace simulator {

struct ProcessResult {
  int status = 0;  // as returned by waitpid
  std::string output, errors;
};

// arguments[0] is the program's path. Throws std::runtime_error if the program cannot be started.
ProcessResult run_process(const std::vector<std::string>& arguments);

}  // namespace simulator
