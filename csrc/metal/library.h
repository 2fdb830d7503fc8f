// Pipelines: one a kernel variant, compiled at first use and kept for the process.
#pragma once
#import <Metal/Metal.h>

#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "launch/launch.h"

namespace torch_gdn {

class Library {
 public:
  // May compile: do not call it on the stream's queue, where it would block all encoding.
  id<MTLComputePipelineState> pipeline(const Launch& launch);
  PipelineFacts compile(const Variant& variant);
  std::vector<PipelineFacts> facts() const;
  void clear();

 private:
  struct Entry {
    id<MTLComputePipelineState> state;
    size_t most_threads;
    std::string warnings;
    double compile_seconds;
  };
  // What names a variant, as a launch has it.
  struct Key {
    const char* kernel;
    TemplateArguments arguments;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const;
  };
  const Entry& entry(const Launch& launch);    // with the lock held, as those below
  const Entry& entry(const Variant& variant);  // compiled if it is new
  static PipelineFacts facts_of(const std::string& name, const Entry& entry);
  mutable std::mutex mutex_;
  std::map<std::string, Entry> entries_;  // by name
  std::unordered_map<Key, const Entry*, KeyHash> launched_;
};

}  // namespace torch_gdn
