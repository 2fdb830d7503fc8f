#include "metal/library.h"

#import <Foundation/Foundation.h>

#include <ATen/mps/MPSDevice.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>

namespace torch_gdn {

namespace {

const char* message(NSError* error) { return error ? [[error localizedDescription] UTF8String] : "no error given"; }

// Sets what the defaults get wrong. The host's language version may have no bfloat, and fast math may drop infinities
// and NaN. From macOS 15 on, precise functions and safe math are separate settings.
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

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::string names_of(id<MTLLibrary> library) {
  NSArray<NSString*>* functions = [library functionNames];
  std::string names;
  for (NSUInteger i = 0; i < [functions count]; ++i)
    names += (i ? ", " : "") + std::string([[functions objectAtIndex:i] UTF8String]);
  return names.empty() ? "none" : names;
}

}  // namespace

// A Metal library with several kernel variants of one file.
class Source {
 public:
  explicit Source(c10::ArrayRef<Variant> variants) {
    const auto start = Clock::now();
    @autoreleasepool {
      NSError* error = nil;
      library_ = [at::mps::MPSDevice::getInstance()->device()
          newLibraryWithSource:[NSString stringWithUTF8String:shader_source(variants).c_str()]
                       options:compile_options()
                         error:&error];
      TORCH_CHECK(library_, "torch_gdn: Metal could not compile ", variants.front().name(), ": ", message(error));
      if (error) warnings = message(error);
    }
    seconds_of_each = seconds_since(start) / double(variants.size());
  }
  ~Source() { [library_ release]; }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  id<MTLComputePipelineState> new_pipeline(const Variant& variant) const {
    @autoreleasepool {
      const std::string name = variant.name();
      NSError* error = nil;
      id<MTLFunction> function =
          [[library_ newFunctionWithName:[NSString stringWithUTF8String:name.c_str()]] autorelease];
      TORCH_CHECK(function, "torch_gdn: expected the library of ", variant.file, " to have a kernel ", name,
                  ", got a library with these functions: ", names_of(library_));
      id<MTLComputePipelineState> state = [[library_ device] newComputePipelineStateWithFunction:function error:&error];
      TORCH_CHECK(state, "torch_gdn: Metal could not make a pipeline for ", name, ": ", message(error));
      return state;
    }
  }

  std::string warnings;  // warnings of the compiler
  double seconds_of_each;

 private:
  id<MTLLibrary> library_;
};

Pipeline::Pipeline(const Source& source, const Variant& variant) : name_(variant.name()), warnings_(source.warnings) {
  const auto start = Clock::now();
  state_ = source.new_pipeline(variant);
  compile_seconds_ = source.seconds_of_each + seconds_since(start);
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
  auto& launched = launched_[launch.key()];
  if (!launched) launched = slot_named(launch.variant().name());
  SharedPipeline result = launched->pipeline;
  if (!result) {
    const auto slot = launched;  // clear() may drop the other references
    lock.unlock();
    result = compiled_in(*slot, launch.variant());
  }
  TORCH_CHECK(size_t(launch.threads) <= result->most_threads(), "torch_gdn: ", launch.variant().name(), " needs ",
              launch.threads, " threads per threadgroup; this GPU allows ", result->most_threads());
  return result;
}

// If the source of all variants fails, compiles them one by one, because the error would name the wrong variant.
std::vector<PipelineFacts> Library::compile(c10::ArrayRef<Variant> variants) {
  if (variants.size() > 1) compile_together(variants);
  std::vector<PipelineFacts> facts;
  std::exception_ptr first_error;
  for (const auto& variant : variants) {
    try {
      facts.push_back(compiled_in(*slot_of(variant), variant)->facts());
    } catch (const c10::Error&) {
      if (!first_error) first_error = std::current_exception();
    }
  }
  if (first_error) std::rethrow_exception(first_error);
  return facts;
}

// Skips variants that another thread compiles. Raises nothing: a variant that fails here is compiled again by itself.
void Library::compile_together(c10::ArrayRef<Variant> variants) {
  std::vector<Variant> missing;
  std::vector<std::shared_ptr<Slot>> slots;
  std::vector<std::unique_lock<std::mutex>> compiling;
  for (const auto& variant : variants) {
    const auto slot = slot_of(variant);
    if (std::ranges::find(slots, slot) != slots.end()) continue;
    std::unique_lock<std::mutex> lock(slot->compiling, std::try_to_lock);
    if (!lock.owns_lock() || pipeline_in(*slot)) continue;
    missing.push_back(variant);
    slots.push_back(slot);
    compiling.push_back(std::move(lock));
  }
  if (missing.size() < 2) return;
  try {
    const Source source(missing);
    for (size_t i = 0; i < missing.size(); ++i) {
      keep(*slots[i], std::make_shared<const Pipeline>(source, missing[i]));
      compiling[i].unlock();  // a launch may wait for this variant
    }
  } catch (const c10::Error&) {
  }
}

std::shared_ptr<Library::Slot> Library::slot_named(const std::string& name) {
  auto& slot = slots_[name];
  if (!slot) slot = std::make_shared<Slot>();
  return slot;
}

std::shared_ptr<Library::Slot> Library::slot_of(const Variant& variant) {
  const std::lock_guard<std::mutex> guard(mutex_);
  return slot_named(variant.name());
}

SharedPipeline Library::pipeline_in(const Slot& slot) const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return slot.pipeline;
}

SharedPipeline Library::keep(Slot& slot, SharedPipeline pipeline) {
  const std::lock_guard<std::mutex> guard(mutex_);
  return slot.pipeline = std::move(pipeline);
}

SharedPipeline Library::compiled_in(Slot& slot, const Variant& variant) {
  const std::lock_guard<std::mutex> compiling(slot.compiling);
  const SharedPipeline result = pipeline_in(slot);
  return result ? result : keep(slot, std::make_shared<const Pipeline>(Source(variant), variant));
}

std::vector<PipelineFacts> Library::facts() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  std::vector<PipelineFacts> facts;
  for (const auto& [name, slot] : slots_) {
    if (slot->pipeline) facts.push_back(slot->pipeline->facts());
  }
  return facts;
}

// A pipeline that is still being compiled ends in a slot that only its callers hold.
void Library::clear() {
  const std::lock_guard<std::mutex> guard(mutex_);
  launched_.clear();
  slots_.clear();
}

}  // namespace torch_gdn
