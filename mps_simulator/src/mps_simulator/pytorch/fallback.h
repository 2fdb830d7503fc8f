#pragma once
#include <cstdint>
#include <map>
#include <string>

namespace simulator {

std::map<std::string, uint64_t> fallbacks();  // number of times that each aten op ran on the CPU
void count_fallback(const std::string& op);

}  // namespace simulator
