// Host code as a Mac has it, right and wrong, for test_device_host_code.py. It uses the wheel's own headers and
// PyTorch's stream.
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>
#include <ATen/native/mps/MetalShaderLibrary.h>
#include <ATen/native/mps/OperationUtils.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using at::mps::dispatch_sync_with_rethrow;
using at::mps::getCurrentMPSStream;

constexpr char kSource[] = R"(
kernel void twice(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant uint& n [[buffer(2)]],
                  uint i [[thread_position_in_grid]]) {
  if (i < n) y[i] = FACTOR * x[i];
})";

id<MTLComputePipelineState> new_pipeline() {
  @autoreleasepool {
    MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
    options.languageVersion = MTLLanguageVersion3_1;
    options.fastMathEnabled = NO;
    options.preprocessorMacros = @{@"FACTOR" : @(2)};
    id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
    NSError* error = nil;
    id<MTLLibrary> library = [[device newLibraryWithSource:@(kSource) options:options error:&error] autorelease];
    TORCH_CHECK(library, [[error localizedDescription] UTF8String]);
    id<MTLFunction> function = [[library newFunctionWithName:@"twice"] autorelease];
    return [device newComputePipelineStateWithFunction:function error:nil];
  }
}

id<MTLComputePipelineState> pipeline() {
  static id<MTLComputePipelineState> state = new_pipeline();
  return state;
}

void encode(id<MTLComputeCommandEncoder> encoder, const Tensor& x, const Tensor& y) {
  const auto count = static_cast<uint32_t>(x.numel());
  [encoder setComputePipelineState:pipeline()];
  at::native::mps::mtl_setArgs(encoder, x, y, count);
  at::native::mps::mtl_dispatch1DJob(encoder, pipeline(), count);
}

Tensor twice(const Tensor& x) {
  Tensor y = at::empty_like(x);
  pipeline();
  auto* stream = getCurrentMPSStream();
  dispatch_sync_with_rethrow(stream->queue(), ^{
    @autoreleasepool {
      encode(stream->commandEncoder(), x, y);
    }
  });
  return y;
}

// Its temporary dies, still unwritten, when this returns.
Tensor four_times(const Tensor& x) { return twice(twice(x)); }

// Runs the same kernel through PyTorch's C++ wrappers.
Tensor twice_by_library(const Tensor& x) {
  static auto* library = new at::native::mps::DynamicMetalShaderLibrary("#define FACTOR 2\n" + std::string(kSource));
  static auto kernel = library->getKernelFunction("twice");
  Tensor y = at::empty_like(x);
  kernel->runCommandBlock([&] {
    kernel->startEncoding();
    kernel->setArg(0, x);
    kernel->setArg(1, y);
    kernel->setArg(2, static_cast<uint32_t>(x.numel()));
    kernel->dispatch(x.numel(), 32);
  });
  return y;
}

Tensor copy_by_stream(const Tensor& x) {
  Tensor y = at::empty_like(x);
  getCurrentMPSStream()->copy(at::native::mps::getMTLBufferStorage(x), at::native::mps::getMTLBufferStorage(y),
                              x.nbytes(), x.storage_offset() * x.element_size(), 0, 0);
  return y;
}

int64_t completed = 0;
Tensor count_completion(const Tensor& x) {
  Tensor y = twice(x);
  getCurrentMPSStream()->addCompletedHandler(^(id<MTLCommandBuffer> buffer) {
    if (buffer.status == MTLCommandBufferStatusCompleted) completed++;
  });
  return y;
}
int64_t completions() { return completed; }

Tensor throws_in_block(const Tensor& x) {
  dispatch_sync_with_rethrow(getCurrentMPSStream()->queue(), ^{
    @autoreleasepool {
      TORCH_CHECK_VALUE(false, "thrown inside the block");
    }
  });
  return x;
}

Tensor throws_in_bare_dispatch_sync(const Tensor& x) {
  dispatch_sync(getCurrentMPSStream()->queue(), ^{
    TORCH_CHECK_VALUE(false, "thrown inside the block");
  });
  return x;
}

Tensor catches(const Tensor& x) {
  try {
    TORCH_CHECK(false, "thrown and caught");
  } catch (const c10::Error&) {
    return twice(x);
  }
  return x;
}

Tensor waits_inside_block(const Tensor& x) {
  dispatch_sync_with_rethrow(getCurrentMPSStream()->queue(), ^{
    x.cpu();
  });
  return x;
}

Tensor encodes_off_the_queue(const Tensor& x) {
  encode(getCurrentMPSStream()->commandEncoder(), x, x);
  return x;
}

// This is the widely copied way. It works on a fresh command buffer, and fails an assertion after any other op.
Tensor own_encoder(const Tensor& x) {
  Tensor y = at::empty_like(x);
  auto* stream = getCurrentMPSStream();
  dispatch_sync_with_rethrow(stream->queue(), ^{
    @autoreleasepool {
      id<MTLComputeCommandEncoder> encoder = [stream->commandBuffer() computeCommandEncoder];
      encode(encoder, x, y);
      [encoder endEncoding];
    }
  });
  return y;
}

Tensor over_releases(const Tensor& x) {
  id<MTLComputePipelineState> state = new_pipeline();
  [state release];
  [state release];
  return x;
}

TORCH_LIBRARY(simulator_probe, m) {
  for (const char* name : {"twice", "four_times", "twice_by_library", "copy_by_stream", "count_completion",
                           "throws_in_block", "throws_in_bare_dispatch_sync", "catches", "waits_inside_block",
                           "encodes_off_the_queue", "own_encoder", "over_releases"})
    m.def((std::string(name) + "(Tensor x) -> Tensor").c_str());
  m.def("completions() -> int", completions);
}

TORCH_LIBRARY_IMPL(simulator_probe, MPS, m) {
  m.impl("twice", twice);
  m.impl("four_times", four_times);
  m.impl("twice_by_library", twice_by_library);
  m.impl("copy_by_stream", copy_by_stream);
  m.impl("count_completion", count_completion);
  m.impl("throws_in_block", throws_in_block);
  m.impl("throws_in_bare_dispatch_sync", throws_in_bare_dispatch_sync);
  m.impl("catches", catches);
  m.impl("waits_inside_block", waits_inside_block);
  m.impl("encodes_off_the_queue", encodes_off_the_queue);
  m.impl("own_encoder", own_encoder);
  m.impl("over_releases", over_releases);
}

}  // namespace
