// PyTorch's own MPSStream and MPSDevice, compiled with the wheel's real headers.
#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>
#include <c10/metal/error.h>

#include <atomic>
#include <cstring>

#include "command_mode.h"
#include "device.h"
#include "mps_simulator/foundation/queue.h"
#include "objects.h"
#include "simulated_mac.h"

namespace simulator {
static std::atomic<uint64_t> waits_for_stream{0};
}

namespace at::mps {

void dispatch_sync_with_rethrow(dispatch_queue_t queue, void (^block)()) {
  __block std::exception_ptr failure;
  dispatch_sync(queue, ^{
    try {
      block();
    } catch (...) {
      failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
}

MPSDevice* MPSDevice::_device = nullptr;

MPSDevice::MPSDevice() : _mtl_device(MTLCreateSystemDefaultDevice()) {}
MPSDevice::~MPSDevice() = default;

MPSDevice* MPSDevice::getInstance() {
  static MPSDevice* device = _device = new MPSDevice;
  return device;
}

std::string MPSDevice::getName() const { return simulator::kDeviceName; }
unsigned MPSDevice::getCoreCount() const { return simulator::kCoreCount; }
// macOS 15.0 is the second value of the enumeration. torch 2.14 renamed the values.
bool MPSDevice::isMacOS13Plus(MacOSVersion version) const { return static_cast<int>(version) <= 1; }

bool is_available() { return true; }
bool is_macos_13_or_newer(MacOSVersion version) { return MPSDevice::getInstance()->isMacOS13Plus(version); }
bool is_macos_at_least(MacOSVersion version) { return is_macos_13_or_newer(version); }  // its name from torch 2.14 on
bool is_apple_family_or_newer(AppleGPUFamily family) { return static_cast<int>(family) <= simulator::kFamily; }

MPSStream::MPSStream(Stream stream) : _stream(stream) {
  TORCH_CHECK(_stream.device_type() == DeviceType::MPS);
  SimCommandQueue* queue = (SimCommandQueue*)[MPSDevice::getInstance()->device() newCommandQueue];
  _serialQueue = dispatch_queue_create("metal gpu stream", nullptr);
  queue->serial_queue = _serialQueue;
  _commandQueue = queue;
}

MPSStream::~MPSStream() = default;  // there is one per process, and it is never destroyed

MTLDevice_t MPSStream::device() const { return [_commandQueue device]; }

MPSCommandBuffer_t MPSStream::commandBuffer() {
  if (!_commandBuffer) {
    @autoreleasepool {
      _commandBuffer = [[MPSCommandBuffer commandBufferFromCommandQueue:_commandQueue] retain];
    }
  }
  return _commandBuffer;
}

MTLComputeCommandEncoder_t MPSStream::commandEncoder() {
  [(SimCommandQueue*)_commandQueue requireQueue:"MPSStream::commandEncoder()"];
  if (!_commandEncoder) {
    @autoreleasepool {
      const auto type = simulator::is_concurrent ? MTLDispatchTypeConcurrent : MTLDispatchTypeSerial;
      _commandEncoder = [[commandBuffer() computeCommandEncoderWithDispatchType:type] retain];
    }
  }
  return _commandEncoder;
}

void MPSStream::endKernelCoalescing() {
  if (!_commandEncoder) return;
  MTLComputeCommandEncoder_t encoder = _commandEncoder;
  _commandEncoder = nil;
  @autoreleasepool {
    [[encoder autorelease] endEncoding];
  }
}

void MPSStream::flush() {
  if (!_commandBuffer) return;
  MPSCommandBuffer_t buffer = _commandBuffer;
  _commandBuffer = nil;
  @autoreleasepool {
    [[buffer autorelease] commit];
  }
}

void MPSStream::commitAndWait() {
  if (!_commandBuffer) return;
  ++simulator::waits_for_stream;
  // The stream forgets the command buffer first, so that it gets a new one if a command fails.
  MPSCommandBuffer_t buffer = _commandBuffer;
  _commandBuffer = nil;
  @autoreleasepool {
    [buffer autorelease];
    [buffer commit];
    [buffer waitUntilCompleted];
  }
  checkLastError();
}

void MPSStream::commitAndContinue() { [commandBuffer() commitAndContinue]; }

void MPSStream::commit() {
  if (_enableCommitAndContinue)
    commitAndContinue();
  else
    flush();
}

void MPSStream::synchronize(SyncType type) {
  endKernelCoalescing();
  switch (type) {
    case SyncType::NONE:
      break;
    case SyncType::COMMIT:
    case SyncType::COMMIT_ADAPTIVE:
      commit();
      break;
    case SyncType::COMMIT_AND_WAIT:
      commandBuffer();
      commitAndWait();
      break;
    case SyncType::COMMIT_AND_CONTINUE:
      commitAndContinue();
      break;
  }
}

void MPSStream::addCompletedHandler(MTLCommandBufferHandler block) {
  dispatch_sync_with_rethrow(_serialQueue, ^{
    [commandBuffer() addCompletedHandler:block];
  });
}

void MPSStream::copy(MTLBuffer_t source, MTLBuffer_t destination, size_t length, size_t source_offset,
                     size_t destination_offset, uint64_t, SyncType type) {
  dispatch_sync_with_rethrow(_serialQueue, ^{
    @autoreleasepool {
      endKernelCoalescing();
      id<MTLBlitCommandEncoder> encoder = [commandBuffer() blitCommandEncoder];
      [encoder copyFromBuffer:source
                 sourceOffset:source_offset
                     toBuffer:destination
            destinationOffset:destination_offset
                         size:length];
      [encoder endEncoding];
      synchronize(type);
    }
  });
}

void MPSStream::copy_and_sync(MTLBuffer_t source, MTLBuffer_t destination, size_t length, size_t source_offset,
                              size_t destination_offset, bool non_blocking, uint64_t profile) {
  copy(source, destination, length, source_offset, destination_offset, profile,
       non_blocking ? SyncType::COMMIT : SyncType::COMMIT_AND_WAIT);
}

void MPSStream::executeMPSGraph(MPSGraph*, NSDictionary*, NSDictionary*, SyncType) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "MPSGraph is not simulated");
}

MTLBuffer_t MPSStream::getErrorBuffer() {
  if (!_errorBuffer) {
    _errorBuffer = [device() newBufferWithLength:sizeof(c10::metal::ErrorMessages)
                                         options:MTLResourceStorageModeShared];
    memset([_errorBuffer contents], 0, sizeof(c10::metal::ErrorMessages));
  }
  return _errorBuffer;
}

void MPSStream::checkLastError() {
  if (!_errorBuffer) return;
  auto* messages = reinterpret_cast<c10::metal::ErrorMessages*>(((SimBuffer*)_errorBuffer)->state->data);
  if (messages->count == 0) return;
  messages->count = 0;
  static c10::metal::ErrorMessage last;  // the exception keeps pointers to its names
  last = messages->msg[0];
  throw c10::AcceleratorError({last.func, last.file, last.line}, 1,
                              std::string(last.message) + " (kernel " + last.func + ")");
}

MPSStream* MPSStreamImpl::_stream = nullptr;
MPSStreamImpl::MPSStreamImpl() = default;

MPSStream* MPSStreamImpl::getInstance() {
  static MPSStream* stream = _stream = new MPSStream(Stream(Stream::UNSAFE, c10::Device(c10::DeviceType::MPS, 0), 0));
  return stream;
}

MPSStream* getDefaultMPSStream() { return MPSStreamImpl::getInstance(); }
MPSStream* getCurrentMPSStream() { return getDefaultMPSStream(); }

}  // namespace at::mps

namespace simulator {
namespace {

at::mps::MPSStream& stream() { return *at::mps::getDefaultMPSStream(); }

SimBuffer* as_buffer(const void* buffer) { return (SimBuffer*)const_cast<void*>(buffer); }

// A block of the queue may call PyTorch's allocator (to make a tensor while encoding), but it may not copy.
void on_stream_queue(void (^work)()) {
  if (on_queue(stream().queue()))
    work();
  else
    at::mps::dispatch_sync_with_rethrow(stream().queue(), work);
}

SimCommandBuffer* root_command_buffer() { return (SimCommandBuffer*)[stream().commandBuffer() rootCommandBuffer]; }

}  // namespace

void* create_buffer(size_t length, size_t capacity) {
  SimBuffer* buffer = [[SimBuffer alloc] initWithLength:length capacity:capacity];
  if (buffer) buffer->state->owners = 1;
  return buffer;
}
void destroy_buffer(void* buffer) { [as_buffer(buffer) disown]; }
std::byte* buffer_data(const void* buffer) { return as_buffer(buffer)->state->data; }
size_t buffer_length(const void* buffer) { return as_buffer(buffer)->state->length; }
size_t buffer_capacity(const void* buffer) { return as_buffer(buffer)->state->capacity; }
void set_buffer_length(void* buffer, size_t length) { as_buffer(buffer)->state->length = length; }
bool is_buffer_busy(const void* buffer) { return as_buffer(buffer)->state->pending > 0; }
uint32_t buffer_retain_count(const void* buffer) { return [as_buffer(buffer) retainCount]; }

void enqueue(std::function<void()> work, const std::vector<const void*>& buffers) {
  std::function<void()>* moved = &work;
  const std::vector<const void*>* used = &buffers;
  at::mps::dispatch_sync_with_rethrow(stream().queue(), ^{
    stream().endKernelCoalescing();
    SimCommandBuffer* command_buffer = root_command_buffer();
    [command_buffer requireIdle:"a copy"];
    for (const void* buffer : *used) [command_buffer use:as_buffer(buffer)];
    [command_buffer push:std::move(*moved) bookkeeping:NO];
  });
}

void enqueue_bookkeeping(std::function<void()> work, const void* buffer) {
  std::function<void()>* moved = &work;
  on_stream_queue(^{
    SimCommandBuffer* command_buffer = root_command_buffer();
    if (buffer) [command_buffer use:as_buffer(buffer)];
    [command_buffer push:std::move(*moved) bookkeeping:YES];
  });
}

void commit_stream() {
  on_stream_queue(^{
    stream().synchronize(at::mps::SyncType::COMMIT);
  });
}

void wait_for_stream() {
  at::mps::dispatch_sync_with_rethrow(stream().queue(), ^{
    stream().synchronize(at::mps::SyncType::COMMIT_AND_WAIT);
  });
}

bool is_stream_idle() { return pending_commands() == 0; }
uint64_t pending_commands() { return commands_encoded - commands_completed; }
uint64_t waits() { return waits_for_stream; }

void* stream_command_buffer() {
  stream().endKernelCoalescing();
  return stream().commandBuffer();
}

dispatch_queue_t stream_queue() { return stream().queue(); }

}  // namespace simulator
