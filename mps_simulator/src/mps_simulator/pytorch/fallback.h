#pragma once
#include <cstdint>
#include <map>
#include <string>

namespace simulator {

std::map<std::string, uint64_t> fallbacks();  // number of times that each aten op ran on the CPU
void count_fallback(const std::string& op);
void say_what_is_loaded(const std::string& text);  // in the error of an op that has no kernel

}  // namespace simulator
