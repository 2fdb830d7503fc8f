// Pipelines: one a kernel variant, compiled at first use and kept for the process.
#pragma once
#import <Metal/Metal.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "metal/launch.h"

namespace torch_gdn {

class Library {
 public:
  // May compile: do not call it on the stream's queue, where it would block all encoding.
  id<MTLComputePipelineState> pipeline(const Launch& launch);
  PipelineFacts compile(const Launch& launch);
  std::vector<PipelineFacts> facts() const;
  void clear();

 private:
  struct Entry {
    id<MTLComputePipelineState> state;
    std::string warnings;
    double compile_seconds;
  };
  const Entry& entry(const Launch& launch);  // with the lock held
  static PipelineFacts facts_of(const std::string& name, const Entry& entry);
  mutable std::mutex mutex_;
  std::map<std::string, Entry> entries_;
};

}  // namespace torch_gdn
