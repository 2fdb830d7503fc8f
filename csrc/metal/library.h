// Keeps one pipeline per kernel variant. It is compiled at first use and kept until the process ends.
#pragma once
#import <Metal/Metal.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "launch/launch.h"

namespace torch_gdn {

class Source;

// A compiled kernel variant. Its last owner releases it.
class Pipeline {
 public:
  Pipeline(const Source& source, const Variant& variant);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  id<MTLComputePipelineState> state() const { return state_; }
  size_t most_threads() const { return most_threads_; }
  PipelineFacts facts() const;

 private:
  std::string name_, warnings_;
  double compile_seconds_;
  id<MTLComputePipelineState> state_;
  size_t most_threads_;
};

// Hold a reference while you encode the pipeline. After that, the command buffer retains it.
using SharedPipeline = std::shared_ptr<const Pipeline>;

// Any thread may call this. Threads compile different variants at the same time. Each variant is compiled once, and
// other threads that need it wait. A launch compiles only its own variant, so it does not wait for others.
class Library {
 public:
  // This may compile. Do not call it on the stream's queue, because it would block all encoding.
  SharedPipeline pipeline(const Launch& launch);
  std::vector<PipelineFacts> compile(c10::ArrayRef<Variant> variants);  // all variants are in one file; see Launcher
  std::vector<PipelineFacts> facts() const;
  void clear();

 private:
  struct Slot {
    std::mutex compiling;     // held by the thread that compiles the pipeline
    SharedPipeline pipeline;  // guarded by the library's mutex; null until compiled
  };
  std::shared_ptr<Slot> slot_named(const std::string& name);  // call with mutex_ held
  std::shared_ptr<Slot> slot_of(const Variant& variant);
  SharedPipeline pipeline_in(const Slot& slot) const;
  SharedPipeline keep(Slot& slot, SharedPipeline pipeline);
  SharedPipeline compiled_in(Slot& slot, const Variant& variant);
  void compile_together(c10::ArrayRef<Variant> variants);

  mutable std::mutex mutex_;                            // never held while Metal compiles
  std::map<std::string, std::shared_ptr<Slot>> slots_;  // keyed by name
  std::unordered_map<LaunchKey, std::shared_ptr<Slot>, LaunchKeyHash> launched_;
};

}  // namespace torch_gdn
