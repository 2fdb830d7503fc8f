#include "library.h"

#import <Foundation/Foundation.h>

#include <ATen/mps/MPSDevice.h>
#include <c10/util/Exception.h>

#include <chrono>

#include "../shader_source.h"

namespace torch_gdn {

namespace {

const char* message(NSError* error) { return error ? [[error localizedDescription] UTF8String] : "no error given"; }

// Both defaults would be the host's: an old language has no bfloat, and fast math may drop infinities and NaN.
MTLCompileOptions* compile_options() {
  MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
  options.languageVersion = MTLLanguageVersion3_1;
#if defined(__MAC_15_0)
  if (@available(macOS 15.0, *)) {
    options.mathMode = MTLMathModeSafe;
    return options;
  }
#endif
  options.fastMathEnabled = NO;
  return options;
}

id<MTLComputePipelineState> compile(const Launch& launch) {
  const std::string name = launch.name();
  const std::string source = shader_source(launch);
  id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
  NSError* error = nil;
  id<MTLLibrary> library = [[device newLibraryWithSource:[NSString stringWithUTF8String:source.c_str()]
                                                 options:compile_options()
                                                   error:&error] autorelease];
  TORCH_CHECK(library, "torch_gdn: Metal could not compile ", name, ": ", message(error));
  id<MTLFunction> function = [[library newFunctionWithName:[NSString stringWithUTF8String:name.c_str()]] autorelease];
  TORCH_CHECK(function, "torch_gdn: the library of ", launch.file, " has no kernel ", name);
  id<MTLComputePipelineState> state = [device newComputePipelineStateWithFunction:function error:&error];
  TORCH_CHECK(state, "torch_gdn: Metal could not make a pipeline of ", name, ": ", message(error));
  return state;
}

}  // namespace

id<MTLComputePipelineState> Library::pipeline(const Launch& launch) {
  const std::string name = launch.name();
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto found = entries_.find(name);
  if (found != entries_.end()) return found->second.state;
  const auto start = std::chrono::steady_clock::now();
  @autoreleasepool {
    id<MTLComputePipelineState> state = compile(launch);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const size_t limit = [state maxTotalThreadsPerThreadgroup];
    if (launch.threads > limit) {
      [state release];
      TORCH_CHECK(false, "torch_gdn: ", name, " needs ", launch.threads, " threads a threadgroup, this GPU allows it ",
                  limit);
    }
    entries_.emplace(name, Entry{state, seconds.count()});
    return state;
  }
}

std::vector<PipelineFacts> Library::facts() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  std::vector<PipelineFacts> facts;
  for (const auto& [name, entry] : entries_) {
    facts.push_back({name, entry.compile_seconds, [entry.state maxTotalThreadsPerThreadgroup],
                     [entry.state threadExecutionWidth], [entry.state staticThreadgroupMemoryLength]});
  }
  return facts;
}

void Library::clear() {
  const std::lock_guard<std::mutex> guard(mutex_);
  for (const auto& [name, entry] : entries_) [entry.state release];  // a command buffer that uses it retains it
  entries_.clear();
}

}  // namespace torch_gdn
