// An mps op as its author writes it for a Mac: nothing in it knows of the simulated device.
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>
#include <ATen/native/mps/OperationUtils.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

namespace {

using at::Tensor;

constexpr char kSource[] = R"(
#include <metal_stdlib>
using namespace metal;

kernel void reversed(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                     constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  if (i < n) y[i] = x[n - 1 - i];
}

// Planted: thread 0 reads x[n].
kernel void reversed_wrong(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                           constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  if (i < n) y[i] = x[n - i];
})";

id<MTLComputePipelineState> new_pipeline(NSString* name) {
  @autoreleasepool {
    id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
    NSError* error = nil;
    id<MTLLibrary> library = [[device newLibraryWithSource:@(kSource) options:nil error:&error] autorelease];
    TORCH_CHECK(library, error.localizedDescription.UTF8String);
    id<MTLFunction> function = [[library newFunctionWithName:name] autorelease];
    return [device newComputePipelineStateWithFunction:function error:&error];
  }
}

Tensor run(id<MTLComputePipelineState> pipeline, const Tensor& x) {
  TORCH_CHECK(x.is_contiguous() && x.scalar_type() == at::kFloat, "expected a contiguous float32 tensor");
  Tensor y = at::empty_like(x);
  const auto n = static_cast<uint32_t>(x.numel());
  auto* stream = at::mps::getCurrentMPSStream();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
    @autoreleasepool {
      id<MTLComputeCommandEncoder> encoder = stream->commandEncoder();
      [encoder setComputePipelineState:pipeline];
      [encoder setBuffer:at::native::mps::getMTLBufferStorage(x)
                  offset:x.storage_offset() * x.element_size()
                 atIndex:0];
      [encoder setBuffer:at::native::mps::getMTLBufferStorage(y) offset:0 atIndex:1];
      [encoder setBytes:&n length:sizeof(n) atIndex:2];
      [encoder dispatchThreads:MTLSizeMake(n, 1, 1) threadsPerThreadgroup:MTLSizeMake(32, 1, 1)];
    }
  });
  return y;
}

Tensor reversed(const Tensor& x) {
  static id<MTLComputePipelineState> pipeline = new_pipeline(@"reversed");
  return run(pipeline, x);
}

Tensor reversed_wrong(const Tensor& x) {
  static id<MTLComputePipelineState> pipeline = new_pipeline(@"reversed_wrong");
  return run(pipeline, x);
}

TORCH_LIBRARY(own_op, m) {
  m.def("reversed(Tensor x) -> Tensor");
  m.def("reversed_wrong(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(own_op, MPS, m) {
  m.impl("reversed", reversed);
  m.impl("reversed_wrong", reversed_wrong);
}

}  // namespace
