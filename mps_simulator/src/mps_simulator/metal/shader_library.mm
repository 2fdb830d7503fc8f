// PyTorch's own wrappers for Metal libraries, which torch.mps.compile_shader and C++ ops use. They compile with the
// wheel's real headers.
#include <ATen/core/TensorBase.h>
#include <ATen/mps/MPSStream.h>
#include <ATen/native/mps/MetalShaderLibrary.h>

#include <algorithm>

namespace at::native::mps {
namespace {

id<MTLBuffer> buffer_of(const at::TensorBase& tensor) {
  return __builtin_bit_cast(id<MTLBuffer>, tensor.storage().data());
}

size_t byte_offset(const at::TensorBase& tensor) { return tensor.storage_offset() * tensor.element_size(); }

MTLSize size_of(c10::ArrayRef<uint64_t> lengths) {
  auto at = [&](size_t i) { return i < lengths.size() ? lengths[i] : 1; };
  return MTLSizeMake(at(0), at(1), at(2));
}

}  // namespace

void* get_tensor_gpu_address(const at::TensorBase& tensor) {
  return reinterpret_cast<void*>([buffer_of(tensor) gpuAddress] + byte_offset(tensor));
}

MetalKernelFunction::MetalKernelFunction(MTLComputePipelineState_t pipeline, MTLFunction_t function)
    : cps([pipeline retain]), func([function retain]) {}

MetalKernelFunction::~MetalKernelFunction() {
  [cps release];
  [func release];
}

uint64_t MetalKernelFunction::getMaxThreadsPerThreadgroup() const { return [cps maxTotalThreadsPerThreadgroup]; }
uint64_t MetalKernelFunction::getThreadExecutionWidth() const { return [cps threadExecutionWidth]; }
uint64_t MetalKernelFunction::getStaticThreadGroupMemoryLength() const { return [cps staticThreadgroupMemoryLength]; }

void MetalKernelFunction::runCommandBlock(std::function<void(void)> work) {
  std::function<void(void)>* block = &work;
  at::mps::dispatch_sync_with_rethrow(at::mps::getCurrentMPSStream()->queue(), ^{
    @autoreleasepool {
      (*block)();
    }
  });
}

void MetalKernelFunction::startEncoding() {
  encoder = at::mps::getCurrentMPSStream()->commandEncoder();
  [encoder setComputePipelineState:cps];
}

void MetalKernelFunction::setArg(unsigned index, const at::TensorBase& tensor) {
  TORCH_CHECK(tensor.device().is_mps(), "argument ", index, " is a tensor on ", tensor.device(), ", expected mps");
  [encoder setBuffer:buffer_of(tensor) offset:byte_offset(tensor) atIndex:index];
}

void MetalKernelFunction::setArg(unsigned index, const void* bytes, uint64_t size) {
  [encoder setBytes:bytes length:size atIndex:index];
}

void MetalKernelFunction::setErrorBufferIndex(unsigned index) {
  [encoder setBuffer:at::mps::getCurrentMPSStream()->getErrorBuffer() offset:0 atIndex:index];
}

void MetalKernelFunction::dispatch(uint64_t length, std::optional<uint64_t> group_size) {
  const uint64_t lengths[] = {length}, groups[] = {group_size.value_or(0)};
  dispatch(c10::ArrayRef<uint64_t>(lengths),
           group_size ? c10::OptionalArrayRef<uint64_t>(groups) : c10::OptionalArrayRef<uint64_t>());
}

void MetalKernelFunction::dispatch(c10::ArrayRef<uint64_t> lengths, c10::OptionalArrayRef<uint64_t> group_size) {
  TORCH_CHECK(!lengths.empty() && lengths.size() <= 3, "a grid has 1 to 3 dimensions, got ", lengths.size());
  TORCH_CHECK(!group_size || group_size->size() == lengths.size(), "threads and group_size must have the same length");
  const MTLSize threads = size_of(lengths);
  const MTLSize group = group_size
                            ? size_of(*group_size)
                            : MTLSizeMake(std::min<uint64_t>(threads.width, getMaxThreadsPerThreadgroup()), 1, 1);
  [encoder dispatchThreads:threads threadsPerThreadgroup:group];
}

MetalShaderLibrary::~MetalShaderLibrary() =
    default;  // libraries and pipelines stay until the process ends, as in PyTorch
DynamicMetalShaderLibrary::~DynamicMetalShaderLibrary() = default;

MTLLibrary_t MetalShaderLibrary::compileLibrary(const std::string& source) {
  @autoreleasepool {
    MTLCompileOptions* options = compile_options;
    if (!options) {  // PyTorch's own choice on macOS 14
      options = [[MTLCompileOptions new] autorelease];
      options.languageVersion = MTLLanguageVersion3_1;
      options.fastMathEnabled = NO;
    }
    NSError* error = nil;
    MTLLibrary_t compiled =
        [at::mps::MPSDevice::getInstance()->device() newLibraryWithSource:[NSString stringWithUTF8String:source.c_str()]
                                                                  options:options
                                                                    error:&error];
    const std::string text = error ? [[error localizedDescription] UTF8String] : "";
    TORCH_CHECK_TYPE(compiled, "Failed to create metal library, error: ", text);
    return compiled;
  }
}

MTLLibrary_t MetalShaderLibrary::getLibrary() {
  if (!library) library = compileLibrary(shaderSource);
  return library;
}

MTLLibrary_t MetalShaderLibrary::getLibrary(const std::initializer_list<std::string>&) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "shader sources with parameters are not simulated");
}

std::pair<MTLComputePipelineState_t, MTLFunction_t> MetalShaderLibrary::getLibraryPipelineState(
    MTLLibrary_t from, const std::string& name) {
  auto& entry = cplMap[name];
  if (entry.first) return entry;
  @autoreleasepool {
    MTLFunction_t function = [from newFunctionWithName:[NSString stringWithUTF8String:name.c_str()]];
    TORCH_CHECK(function, "Failed to create function state object for: ", name);
    entry = {[at::mps::MPSDevice::getInstance()->device() newComputePipelineStateWithFunction:function error:nil],
             function};
  }
  return entry;
}

std::vector<std::string> MetalShaderLibrary::getFunctionNames() {
  std::vector<std::string> names;
  @autoreleasepool {
    for (NSString* name in [getLibrary() functionNames]) names.push_back([name UTF8String]);
  }
  return names;
}

bool MetalShaderLibrary::hasFunction(const std::string& name) {
  if (!functionNamesPopulated) {
    for (std::string& found : getFunctionNames()) functionNames.insert(std::move(found));
    functionNamesPopulated = true;
  }
  return functionNames.count(name) > 0;
}

std::shared_ptr<MetalKernelFunction> MetalShaderLibrary::getKernelFunction(const std::string& name) {
  auto [pipeline, function] = getLibraryPipelineState(getLibrary(), name);
  return std::make_shared<MetalKernelFunction>(pipeline, function);
}

MetalKernelFunction* MetalShaderLibrary::getCachedKernelFunctionPtr(const std::string& name) {
  auto& kernel = kernelCache[name];
  if (!kernel) {
    auto [pipeline, function] = getLibraryPipelineState(getLibrary(), name);
    kernel = std::make_unique<MetalKernelFunction>(pipeline, function);
  }
  return kernel.get();
}

}  // namespace at::native::mps
