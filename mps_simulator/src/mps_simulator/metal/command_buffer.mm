// Command queues and command buffers. Commands run when the host waits for them, or at commit if `run_at_commit` is
// set. They never run while they are encoded, so that the device notices mistakes between encoding and running.
#import <MetalPerformanceShadersGraph/MetalPerformanceShadersGraph.h>

#include <chrono>
#include <mutex>

#include "command_mode.h"
#include "mps_simulator/foundation/queue.h"
#include "objects.h"

NSErrorDomain const MTLCommandBufferErrorDomain = @"MTLCommandBufferErrorDomain";

namespace simulator {

std::atomic<uint64_t> commands_encoded{0}, commands_completed{0};
bool run_at_commit = false;
bool is_concurrent = false;

namespace {

// There is one GPU. The mutex is recursive because a completion handler may wait for another command buffer.
std::recursive_mutex gpu_mutex;

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string message_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& exception) {
    return exception.what();
  }
}

}  // namespace
}  // namespace simulator

using simulator::fault;

@implementation SimCommandQueue
@synthesize label = _label;
- (instancetype)init {
  submitted = new std::deque<SimCommandBuffer*>;
  return self;
}
- (void)dealloc {
  for (SimCommandBuffer* buffer : *submitted) [buffer release];
  delete submitted;
  [_label release];
  [super dealloc];
}
- (id<MTLDevice>)device {
  return MTLCreateSystemDefaultDevice();
}
- (id<MTLCommandBuffer>)commandBuffer {
  return [[[SimCommandBuffer alloc] initWithQueue:self retainedReferences:YES] autorelease];
}
- (id<MTLCommandBuffer>)commandBufferWithUnretainedReferences {
  return [[[SimCommandBuffer alloc] initWithQueue:self retainedReferences:NO] autorelease];
}
- (void)requireQueue:(const char*)action {
  if (serial_queue && !simulator::on_queue(serial_queue))
    fault(std::string(action) + " off the stream's queue: encode in dispatch_sync_with_rethrow(stream->queue(), ...)");
}
- (uint64_t)block {
  return serial_queue ? simulator::block_number(serial_queue) : 0;
}
- (void)drainThrough:(SimCommandBuffer*)last {
  std::lock_guard lock(simulator::gpu_mutex);
  std::exception_ptr failure;
  while (!submitted->empty()) {
    SimCommandBuffer* buffer = submitted->front();
    submitted->pop_front();
    const bool is_last = buffer == last;
    if (failure) {
      [buffer abandon:"an earlier command buffer of the queue failed: " + simulator::message_of(failure)];
    } else {
      try {
        [buffer run];
      } catch (...) {
        failure = std::current_exception();
      }
    }
    [buffer release];
    if (is_last && !failure) break;
  }
  if (failure) std::rethrow_exception(failure);
}
@end

@implementation SimCommandBuffer
@synthesize label = _label;
- (instancetype)initWithQueue:(SimCommandQueue*)owner retainedReferences:(BOOL)retained {
  queue = [owner retain];
  state = new simulator::CommandBufferState;
  state->retained_references = retained;
  return self;
}
- (void)dealloc {
  if (state->status < MTLCommandBufferStatusCommitted) [self doBookkeepingFrom:0];
  simulator::commands_completed += state->commands.size();
  [self letGo];
  for (MTLCommandBufferHandler handler : state->handlers) Block_release(handler);
  delete state;
  [queue release];
  [_label release];
  [super dealloc];
}
- (id<MTLDevice>)device {
  return MTLCreateSystemDefaultDevice();
}
- (id<MTLCommandQueue>)commandQueue {
  return queue;
}
- (BOOL)retainedReferences {
  return state->retained_references;
}
- (MTLCommandBufferStatus)status {
  return state->status;
}
- (NSError*)error {
  if (state->status != MTLCommandBufferStatusError) return nil;
  return [NSError errorWithDomain:MTLCommandBufferErrorDomain
                             code:MTLCommandBufferErrorInternal
                         userInfo:@{NSLocalizedDescriptionKey : [NSString stringWithUTF8String:state->error.c_str()]}];
}

- (CFTimeInterval)GPUStartTime {
  return state->start_time;
}
- (CFTimeInterval)GPUEndTime {
  return state->end_time;
}

- (void)push:(std::function<void()>)work bookkeeping:(BOOL)bookkeeping {
  if (state->status >= MTLCommandBufferStatusCommitted) fault("a command encoded into a committed command buffer");
  state->commands.push_back({std::move(work), static_cast<bool>(bookkeeping)});
  simulator::commands_encoded++;
}
- (void)use:(SimBuffer*)buffer {
  if (!state->buffers.emplace(buffer, buffer->state->serial).second) return;
  buffer->state->pending++;
  if (state->retained_references) [buffer own];
}
- (void)requireIdle:(const char*)action {
  [queue requireQueue:action];
  if (state->status >= MTLCommandBufferStatusCommitted)
    fault(std::string(action) + " after the command buffer was committed");
  if (state->open_encoder)
    fault(std::string(action) + " while a command encoder is already encoding to this command buffer");
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  return [self computeCommandEncoderWithDispatchType:MTLDispatchTypeSerial];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type {
  [self requireIdle:"computeCommandEncoder"];
  state->open_encoder = [[[SimComputeEncoder alloc] initWithCommandBuffer:self dispatchType:type] autorelease];
  return state->open_encoder;
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  [self requireIdle:"blitCommandEncoder"];
  state->open_encoder = [[[SimBlitEncoder alloc] initWithCommandBuffer:self] autorelease];
  return state->open_encoder;
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)handler {
  if (state->status >= MTLCommandBufferStatusCommitted) fault("addCompletedHandler: after commit");
  state->handlers.push_back(Block_copy(handler));
}
- (void)commit {
  [self requireIdle:"commit"];
  state->status = MTLCommandBufferStatusCommitted;
  {
    std::lock_guard lock(simulator::gpu_mutex);
    queue->submitted->push_back([self retain]);
  }
  if (simulator::run_at_commit) [queue drainThrough:self];
}
- (void)waitUntilCompleted {
  if (state->status < MTLCommandBufferStatusCommitted) fault("waitUntilCompleted: before commit");
  if (state->status < MTLCommandBufferStatusCompleted) [queue drainThrough:self];
}

- (void)run {
  state->start_time = simulator::seconds_now();
  for (const auto& [buffer, serial] : state->buffers) {
    uint64_t live_serial = 0;
    if (!state->retained_references && (!simulator::is_live_buffer(buffer, &live_serial) || live_serial != serial))
      return [self dropFrom:0
                    because:std::make_exception_ptr(std::runtime_error(
                                "a command buffer with unretained references names a deallocated MTLBuffer"))];
  }
  for (size_t i = 0; i < state->commands.size(); i++) {
    try {
      state->commands[i].work();
    } catch (...) {
      return [self dropFrom:i + 1 because:std::current_exception()];
    }
  }
  [self finish:MTLCommandBufferStatusCompleted];
}
- (void)doBookkeepingFrom:(size_t)first {
  for (size_t i = first; i < state->commands.size(); i++)
    if (state->commands[i].bookkeeping) state->commands[i].work();
}
- (void)dropFrom:(size_t)first because:(std::exception_ptr)failure {
  [self doBookkeepingFrom:first];
  state->error = simulator::message_of(failure);
  [self finish:MTLCommandBufferStatusError];
  try {
    std::rethrow_exception(failure);
  } catch (...) {
    simulator::rethrow_as_fault("");
  }
}
- (void)abandon:(const std::string&)reason {
  [self doBookkeepingFrom:0];
  state->error = reason;
  [self finish:MTLCommandBufferStatusError];
}
- (void)finish:(MTLCommandBufferStatus)status {
  simulator::commands_completed += state->commands.size();
  state->commands.clear();
  state->status = status;
  state->end_time = simulator::seconds_now();
  [self letGo];
  for (MTLCommandBufferHandler handler : state->handlers) handler(self);
}
- (void)letGo {
  // Each buffer is removed from the list first, because its release throws if it was over-released.
  while (!state->buffers.empty()) {
    const auto [object, serial] = *state->buffers.begin();
    state->buffers.erase(state->buffers.begin());
    uint64_t live_serial = 0;
    if (!simulator::is_live_buffer(object, &live_serial) || live_serial != serial) continue;
    SimBuffer* buffer = (SimBuffer*)object;
    buffer->state->pending--;
    if (state->retained_references) [buffer disown];
  }
  while (!state->others.empty()) {
    id object = state->others.back();
    state->others.pop_back();
    [object release];
  }
}
@end

@implementation MPSCommandBuffer
+ (instancetype)commandBufferFromCommandQueue:(id<MTLCommandQueue>)queue {
  return [self commandBufferWithCommandBuffer:[queue commandBuffer]];
}
+ (instancetype)commandBufferWithCommandBuffer:(id<MTLCommandBuffer>)commandBuffer {
  MPSCommandBuffer* wrapper = [[self new] autorelease];
  wrapper->_root = [commandBuffer retain];
  return wrapper;
}
- (void)dealloc {
  [_root release];
  [super dealloc];
}
- (id<MTLCommandBuffer>)commandBuffer {
  return _root;
}
- (id<MTLCommandBuffer>)rootCommandBuffer {
  return _root;
}
- (void)commitAndContinue {
  id<MTLCommandBuffer> next = [[[_root commandQueue] commandBuffer] retain];
  id<MTLCommandBuffer> committed = [_root autorelease];
  _root = next;
  [committed commit];
}
- (id<MTLDevice>)device {
  return [_root device];
}
- (id<MTLCommandQueue>)commandQueue {
  return [_root commandQueue];
}
- (BOOL)retainedReferences {
  return [_root retainedReferences];
}
- (NSString*)label {
  return [_root label];
}
- (void)setLabel:(NSString*)label {
  [_root setLabel:label];
}
- (MTLCommandBufferStatus)status {
  return [_root status];
}
- (NSError*)error {
  return [_root error];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  return [_root computeCommandEncoder];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type {
  return [_root computeCommandEncoderWithDispatchType:type];
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  return [_root blitCommandEncoder];
}
- (CFTimeInterval)GPUStartTime {
  return [_root GPUStartTime];
}
- (CFTimeInterval)GPUEndTime {
  return [_root GPUEndTime];
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)handler {
  [_root addCompletedHandler:handler];
}
- (void)commit {
  [_root commit];
}
- (void)waitUntilCompleted {
  [_root waitUntilCompleted];
}
@end

@implementation MPSKernel
@end
@implementation MPSNDArray
@end
@implementation MPSGraph
@end
@implementation MPSGraphTensor
- (id)copyWithZone:(NSZone*)zone {
  return [self retain];
}
@end
@implementation MPSGraphTensorData
@end
@implementation MPSGraphExecutionDescriptor
@end
@implementation MPSGraphCompilationDescriptor
@end
