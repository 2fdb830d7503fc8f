#include "metal/library.h"

#import <Foundation/Foundation.h>

#include <ATen/mps/MPSDevice.h>
#include <c10/util/Exception.h>

#include <chrono>

#include "launch/shader_source.h"

namespace torch_gdn {

namespace {

const char* message(NSError* error) { return error ? [[error localizedDescription] UTF8String] : "no error given"; }

// Not the defaults: the host's language version may lack bfloat, fast math may drop infinities and NaN. From macOS 15
// on precise functions are a setting apart from safe math.
MTLCompileOptions* compile_options() {
  MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
  options.languageVersion = MTLLanguageVersion3_1;
#if defined(__MAC_15_0)
  if (@available(macOS 15.0, *)) {
    options.mathMode = MTLMathModeSafe;
    options.mathFloatingPointFunctions = MTLMathFloatingPointFunctionsPrecise;
    return options;
  }
#endif
  options.fastMathEnabled = NO;
  return options;
}

// The pipeline and the compiler's warnings.
std::pair<id<MTLComputePipelineState>, std::string> compiled(const Variant& variant) {
  const std::string name = variant.name();
  const std::string source = shader_source(variant);
  id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
  NSError* error = nil;
  id<MTLLibrary> library = [[device newLibraryWithSource:[NSString stringWithUTF8String:source.c_str()]
                                                 options:compile_options()
                                                   error:&error] autorelease];
  TORCH_CHECK(library, "torch_gdn: Metal could not compile ", name, ": ", message(error));
  const std::string warnings = error ? message(error) : "";
  id<MTLFunction> function = [[library newFunctionWithName:[NSString stringWithUTF8String:name.c_str()]] autorelease];
  TORCH_CHECK(function, "torch_gdn: the library of ", variant.file, " has no kernel ", name);
  id<MTLComputePipelineState> state = [device newComputePipelineStateWithFunction:function error:&error];
  TORCH_CHECK(state, "torch_gdn: Metal could not make a pipeline of ", name, ": ", message(error));
  return {state, warnings};
}

}  // namespace

id<MTLComputePipelineState> Library::pipeline(const Launch& launch) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const Entry& found = entry(launch);
  TORCH_CHECK(launch.threads <= found.most_threads, "torch_gdn: ", launch.variant().name(), " needs ", launch.threads,
              " threads a threadgroup, this GPU allows it ", found.most_threads);
  return found.state;
}

PipelineFacts Library::compile(const Variant& variant) {
  const std::lock_guard<std::mutex> guard(mutex_);
  return facts_of(variant.name(), entry(variant));
}

size_t Library::KeyHash::operator()(const Key& key) const {
  uint64_t hash = reinterpret_cast<uintptr_t>(key.kernel);
  for (const auto& argument : key.arguments) {
    hash = (hash ^ uint32_t(argument.word())) * 0x9e3779b97f4a7c15;  // 2^64 over the golden ratio: odd
    hash ^= hash >> 32;
  }
  return hash;
}

const Library::Entry& Library::entry(const Launch& launch) {
  const Key key{launch.kernel, launch.arguments};
  const auto found = launched_.find(key);
  if (found != launched_.end()) return *found->second;
  const Entry& named = entry(launch.variant());
  launched_.emplace(key, &named);
  return named;
}

const Library::Entry& Library::entry(const Variant& variant) {
  const std::string name = variant.name();
  const auto found = entries_.find(name);
  if (found != entries_.end()) return found->second;
  const auto start = std::chrono::steady_clock::now();
  @autoreleasepool {
    const auto [state, warnings] = compiled(variant);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const Entry entry{state, [state maxTotalThreadsPerThreadgroup], warnings, seconds.count()};
    return entries_.emplace(name, entry).first->second;
  }
}

PipelineFacts Library::facts_of(const std::string& name, const Entry& entry) {
  return {name,
          entry.warnings,
          entry.compile_seconds,
          entry.most_threads,
          [entry.state threadExecutionWidth],
          [entry.state staticThreadgroupMemoryLength]};
}

std::vector<PipelineFacts> Library::facts() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  std::vector<PipelineFacts> facts;
  for (const auto& [name, entry] : entries_) facts.push_back(facts_of(name, entry));
  return facts;
}

void Library::clear() {
  const std::lock_guard<std::mutex> guard(mutex_);
  for (const auto& [name, entry] : entries_) [entry.state release];  // a command buffer that uses it retains it
  launched_.clear();
  entries_.clear();
}

}  // namespace torch_gdn
