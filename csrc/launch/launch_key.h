// Identifies a kernel variant by the members of a launch.
#pragma once
#include "launch/launch.h"

namespace torch_gdn {

struct LaunchKey {
  const char* kernel;
  TemplateArguments arguments;
  bool operator==(const LaunchKey&) const = default;
};

struct LaunchKeyHash {
  size_t operator()(const LaunchKey& key) const {
    uint64_t hash = reinterpret_cast<uintptr_t>(key.kernel);
    for (const auto& argument : key.arguments) {
      hash = (hash ^ uint32_t(argument.word())) * 0x9e3779b97f4a7c15;  // 2^64 divided by the golden ratio, odd
      hash ^= hash >> 32;
    }
    return hash;
  }
};

}  // namespace torch_gdn
