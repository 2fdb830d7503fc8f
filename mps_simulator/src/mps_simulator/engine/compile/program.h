#pragma once
#include <filesystem>
#include <functional>
#include <memory>

#include "mps_simulator/engine/engine.h"

namespace simulator {

// Loads the shared library at `path`, whose compilation took `seconds`. `counted` compiles the version with counters.
std::shared_ptr<const Program> load_program(const std::filesystem::path& path, double seconds,
                                            std::function<std::shared_ptr<const Program>()> counted);

}  // namespace simulator
