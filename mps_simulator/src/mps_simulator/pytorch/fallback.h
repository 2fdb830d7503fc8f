#pragma once
#include <cstdint>
#include <map>
#include <string>

namespace simulator {

std::map<std::string, uint64_t> fallbacks();  // aten op -> times that it ran on the CPU
void count_fallback(const std::string& op);

}  // namespace simulator
