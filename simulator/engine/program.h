// A compiled Metal program, loaded.
#pragma once
#include <filesystem>
#include <memory>

#include "engine.h"

namespace simulator {

// Loads the shared library at `path`. `seconds`: what compiling took.
std::shared_ptr<const Program> load_program(const std::filesystem::path& path, double seconds);

}  // namespace simulator
