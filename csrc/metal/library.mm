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

// Stores the compiler's warnings in `warnings`.
id<MTLComputePipelineState> compiled(const Variant& variant, std::string& warnings) {
  const std::string name = variant.name();
  const std::string source = shader_source(variant);
  id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
  NSError* error = nil;
  id<MTLLibrary> library = [[device newLibraryWithSource:[NSString stringWithUTF8String:source.c_str()]
                                                 options:compile_options()
                                                   error:&error] autorelease];
  TORCH_CHECK(library, "torch_gdn: Metal could not compile ", name, ": ", message(error));
  if (error) warnings = message(error);
  id<MTLFunction> function = [[library newFunctionWithName:[NSString stringWithUTF8String:name.c_str()]] autorelease];
  TORCH_CHECK(function, "torch_gdn: the library of ", variant.file, " has no kernel ", name);
  id<MTLComputePipelineState> state = [device newComputePipelineStateWithFunction:function error:&error];
  TORCH_CHECK(state, "torch_gdn: Metal could not make a pipeline of ", name, ": ", message(error));
  return state;
}

}  // namespace

Pipeline::Pipeline(const Variant& variant) : name_(variant.name()) {
  const auto start = std::chrono::steady_clock::now();
  @autoreleasepool {
    state_ = compiled(variant, warnings_);
  }
  compile_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  most_threads_ = [state_ maxTotalThreadsPerThreadgroup];
}

Pipeline::~Pipeline() { [state_ release]; }

PipelineFacts Pipeline::facts() const {
  return {name_,
          warnings_,
          compile_seconds_,
          most_threads_,
          [state_ threadExecutionWidth],
          [state_ staticThreadgroupMemoryLength]};
}

SharedPipeline Library::pipeline(const Launch& launch) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto& launched = launched_[{launch.kernel, launch.arguments}];
  if (!launched) launched = slot_named(launch.variant().name());
  SharedPipeline found = launched->pipeline;
  if (!found) {
    const auto slot = launched;  // clear() may drop the other references
    lock.unlock();
    found = compiled_in(*slot, launch.variant());
  }
  TORCH_CHECK(launch.threads <= found->most_threads(), "torch_gdn: ", launch.variant().name(), " needs ",
              launch.threads, " threads per threadgroup; this GPU allows ", found->most_threads());
  return found;
}

PipelineFacts Library::compile(const Variant& variant) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto slot = slot_named(variant.name());
  lock.unlock();
  return compiled_in(*slot, variant)->facts();
}

size_t Library::KeyHash::operator()(const Key& key) const {
  uint64_t hash = reinterpret_cast<uintptr_t>(key.kernel);
  for (const auto& argument : key.arguments) {
    hash = (hash ^ uint32_t(argument.word())) * 0x9e3779b97f4a7c15;  // 2^64 over the golden ratio: odd
    hash ^= hash >> 32;
  }
  return hash;
}

std::shared_ptr<Library::Slot> Library::slot_named(const std::string& name) {
  auto& slot = slots_[name];
  if (!slot) slot = std::make_shared<Slot>();
  return slot;
}

SharedPipeline Library::compiled_in(Slot& slot, const Variant& variant) {
  const std::lock_guard<std::mutex> compiling(slot.compiling);
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (slot.pipeline) return slot.pipeline;
  }
  auto pipeline = std::make_shared<const Pipeline>(variant);
  const std::lock_guard<std::mutex> guard(mutex_);
  slot.pipeline = pipeline;
  return pipeline;
}

std::vector<PipelineFacts> Library::facts() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  std::vector<PipelineFacts> facts;
  for (const auto& [name, slot] : slots_) {
    if (slot->pipeline) facts.push_back(slot->pipeline->facts());
  }
  return facts;
}

// A pipeline that is still being compiled ends up in a slot that only its callers hold.
void Library::clear() {
  const std::lock_guard<std::mutex> guard(mutex_);
  launched_.clear();
  slots_.clear();
}

}  // namespace torch_gdn
