#pragma once
#include <cstddef>
#include <string>

namespace simulator {

// Argument tables end at 30. `kernel` may be empty while no pipeline is set.
void validate_index(size_t index, const std::string& kernel);

}  // namespace simulator
