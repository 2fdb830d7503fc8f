// Encodes launches on PyTorch's stream with PyTorch's encoder. It neither commits nor waits, so launches run in order
// with other ops. The command buffer retains bound buffers, so tensors may be freed on return.
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>
#include <c10/metal/error.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "launch/self_test.h"
#include "metal/library.h"
#include "shaders/core/error.h"

namespace torch_gdn {

namespace {

static_assert(sizeof(ErrorLog) == sizeof(c10::metal::ErrorMessages) &&
                  offsetof(ErrorLog, messages) == offsetof(c10::metal::ErrorMessages, msg) &&
                  offsetof(ErrorLog::Message, text) == offsetof(c10::metal::ErrorMessage, message) &&
                  offsetof(ErrorLog::Message, line) == offsetof(c10::metal::ErrorMessage, line),
              "shaders/core/error.h must have the layout of PyTorch's error buffer");

// Metal needs a buffer for every argument. This buffer stands for all absent tensors, which kernels neither read nor
// write. It has room for one element of any type, and lives as long as the process.
id<MTLBuffer> dummy_buffer() {
  static id<MTLBuffer> buffer =
      [at::mps::MPSDevice::getInstance()->device() newBufferWithLength:256 options:MTLResourceStorageModePrivate];
  return buffer;
}

void bind(id<MTLComputeCommandEncoder> encoder, at::mps::MPSStream* stream, const Bindings& bindings,
          const Binding& binding, NSUInteger index) {
  const at::Tensor& tensor = binding.tensor;
  switch (binding.kind) {
    case Binding::Kind::kAbsent:
      return [encoder setBuffer:dummy_buffer() offset:0 atIndex:index];
    case Binding::Kind::kTensor:
      return [encoder setBuffer:__builtin_bit_cast(id<MTLBuffer>, tensor.storage().data())
                         offset:NSUInteger(tensor.storage_offset() * tensor.element_size())
                        atIndex:index];
    case Binding::Kind::kHostArray:  // copied now, because the caller may write to it as soon as the op returns
      return [encoder setBytes:tensor.const_data_ptr() length:tensor.nbytes() atIndex:index];
    case Binding::Kind::kParameterBlock:
      return [encoder setBytes:bindings.block() length:bindings.block_bytes() atIndex:index];
    case Binding::Kind::kErrorLog:
      return [encoder setBuffer:stream->getErrorBuffer() offset:0 atIndex:index];
  }
}

void encode(id<MTLComputeCommandEncoder> encoder, at::mps::MPSStream* stream, const Launch& launch,
            id<MTLComputePipelineState> pipeline) {
  [encoder setComputePipelineState:pipeline];
  NSUInteger index = 0;
  for (const auto& binding : launch.bindings) bind(encoder, stream, launch.bindings, binding, index++);
  const auto& groups = launch.threadgroups;
  [encoder dispatchThreadgroups:MTLSizeMake(groups[0], groups[1], groups[2])
          threadsPerThreadgroup:MTLSizeMake(launch.threads, 1, 1)];
}

// A launch reads what the previous one wrote. PyTorch so far uses a serial encoder, in which Metal keeps that order. In
// a concurrent encoder, which PyTorch is considering, dispatches overlap unless a barrier separates them.
void wait_for_launches_before(id<MTLComputeCommandEncoder> encoder) {
  if ([encoder dispatchType] == MTLDispatchTypeConcurrent) [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
}

// Tests families by number, because the SDK of macOS 14 does not name the latest ones.
std::vector<std::string> families_of(id<MTLDevice> device) {
  static constexpr std::pair<const char*, NSInteger> known[] = {{"Apple7", 1007},  {"Apple8", 1008}, {"Apple9", 1009},
                                                                {"Apple10", 1010}, {"Metal3", 5001}, {"Metal4", 5002}};
  std::vector<std::string> result;
  for (const auto& [name, number] : known) {
    if ([device supportsFamily:MTLGPUFamily(number)]) result.emplace_back(name);
  }
  return result;
}

class MetalLauncher final : public Launcher {
 public:
  void run(Launches launches) override {
    if (!are_tested(launches)) throw Untested();
    // Finds the pipelines first, outside the stream's queue. Skips empty grids, because Metal refuses them.
    c10::SmallVector<std::pair<const Launch*, SharedPipeline>, 8> ready;
    for (const auto& launch : launches) {
      if (!launch.is_empty()) ready.emplace_back(&launch, library_.pipeline(launch));
    }
    if (ready.empty()) return;
    at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
    const auto* work = &ready;
    at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
      @autoreleasepool {
        id<MTLComputeCommandEncoder> encoder = stream->commandEncoder();
        for (const auto& [launch, pipeline] : *work) {
          wait_for_launches_before(encoder);
          encode(encoder, stream, *launch, pipeline->state());
        }
      }
    });
  }

  std::vector<PipelineFacts> compile(c10::ArrayRef<Variant> variants) override { return library_.compile(variants); }

  std::vector<PipelineFacts> pipelines() const override { return library_.facts(); }

  void clear_pipelines() override { library_.clear(); }

  // Metal may call the handler a moment after the wait has ended.
  double wait_and_time() override {
    const auto seconds = std::make_shared<std::atomic<double>>(kUnknown);
    at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
    at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
      @autoreleasepool {
        [stream->commandBuffer() addCompletedHandler:^(id<MTLCommandBuffer> buffer) {
          seconds->store([buffer GPUEndTime] - [buffer GPUStartTime]);
        }];
        stream->synchronize(at::mps::SyncType::COMMIT_AND_WAIT);
      }
    });
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (seconds->load() == kUnknown && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    TORCH_CHECK(seconds->load() != kUnknown, "torch_gdn: Metal did not call the command buffer's completed handler");
    return seconds->load();
  }

  // This is cached, because every prefill asks, and the I/O registry takes microseconds.
  const DeviceFacts& device() const override {
    static const DeviceFacts facts = [] {
      at::mps::MPSDevice* device = at::mps::MPSDevice::getInstance();
      id<MTLDevice> metal = device->device();
      return DeviceFacts{device->getName(),
                         device->getCoreCount(),
                         [metal maxThreadgroupMemoryLength],
                         [metal maxBufferLength],
                         [metal recommendedMaxWorkingSetSize],
                         [metal registryID],
                         families_of(metal)};
    }();
    return facts;
  }

 private:
  static constexpr double kUnknown = -1;
  Library library_;
};

// The launcher is never destroyed, because streams outlive static destructors.
const bool registered = [] {
  set_launcher(new MetalLauncher);
  return true;
}();

}  // namespace

}  // namespace torch_gdn
