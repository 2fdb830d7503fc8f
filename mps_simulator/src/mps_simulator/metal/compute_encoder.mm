// The compute encoder. Errors that Metal's validation layer would report are faults here, at the call that is wrong.
#include <cstring>

#include "mps_simulator/engine/kernel_abi.h"
#include "objects.h"

using simulator::Argument;
using simulator::fault;
using simulator::Setting;

@implementation SimComputeEncoder
@synthesize label = _label;
- (instancetype)initWithCommandBuffer:(SimCommandBuffer*)buffer dispatchType:(MTLDispatchType)type {
  command_buffer = [buffer retain];
  state = new simulator::ComputeEncoderState;
  state->dispatch_type = type;
  return self;
}
- (void)dealloc {
  const bool was_open = !state->ended;
  if (was_open) command_buffer->state->open_encoder = nil;
  delete state;
  [command_buffer release];
  [_label release];
  [super dealloc];
  if (was_open) simulator::fault_unless_unwinding("a compute command encoder was released without endEncoding");
}
- (id<MTLDevice>)device {
  return MTLCreateSystemDefaultDevice();
}
- (MTLDispatchType)dispatchType {
  return state->dispatch_type;
}
- (void)require:(const char*)selector {
  [command_buffer->queue requireQueue:selector];
  if (state->ended) fault(std::string(selector) + " after endEncoding");
}
- (Setting<Argument>&)argument:(NSUInteger)index of:(const char*)selector {
  [self require:selector];
  if (index >= simulator::kMaxBuffers)
    fault(std::string(selector) + " index " + std::to_string(index) + ": the highest is 30");
  return state->arguments[index];
}

- (void)setComputePipelineState:(id<MTLComputePipelineState>)pipeline {
  [self require:"setComputePipelineState:"];
  if (!pipeline) fault("setComputePipelineState: must not be nil");
  if (![pipeline isKindOfClass:[SimPipeline class]]) fault("setComputePipelineState: not a pipeline state");
  command_buffer->state->others.push_back([pipeline retain]);
  state->pipeline = {pipeline, [command_buffer->queue block], true};
}
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  Setting<Argument>& argument = [self argument:index of:"setBuffer:offset:atIndex:"];
  if (!buffer) {
    argument = {};
    return;
  }
  SimBuffer* checked = simulator::checked_buffer(buffer, "setBuffer:offset:atIndex:");
  [command_buffer use:checked];
  argument = {{{}, checked, nullptr}, [command_buffer->queue block], true};
  [self setBufferOffset:offset atIndex:index];
}
- (void)setBufferOffset:(NSUInteger)offset atIndex:(NSUInteger)index {
  Setting<Argument>& argument = [self argument:index of:"setBufferOffset:atIndex:"];
  if (!argument.is_set || !argument.value.buffer)
    fault("setBufferOffset:atIndex: no buffer is set at index " + std::to_string(index));
  const simulator::BufferState& buffer = *((SimBuffer*)argument.value.buffer)->state;
  if (offset > buffer.length)
    fault("setBuffer:offset:atIndex: offset " + std::to_string(offset) + " is past the end of a buffer of " +
          std::to_string(buffer.length) + " bytes, index " + std::to_string(index));
  argument.value.bound = {simulator::BoundArgument::buffer, buffer.data + offset, buffer.length - offset, offset};
}
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
  Setting<Argument>& argument = [self argument:index of:"setBytes:length:atIndex:"];
  if (!bytes || length == 0) fault("setBytes:length:atIndex: no bytes, index " + std::to_string(index));
  if (length > 4096)
    fault("setBytes:length:atIndex: " + std::to_string(length) + " bytes, index " + std::to_string(index) +
          ": 4096 is the most; use a buffer for more");
  const auto* first = static_cast<const std::byte*>(bytes);
  auto copy = std::make_shared<std::vector<std::byte>>(first, first + length);
  simulator::BoundArgument bound{simulator::BoundArgument::bytes, copy->data(), length, 0};
  argument = {{bound, nil, std::move(copy)}, [command_buffer->queue block], true};
}
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
  [self require:"setThreadgroupMemoryLength:atIndex:"];
  if (index >= simulator::kMaxBuffers)
    fault("setThreadgroupMemoryLength:atIndex: index " + std::to_string(index) + ": the highest is 30");
  state->threadgroup_lengths[index] = {length, [command_buffer->queue block], true};
}

- (void)dispatch:(simulator::Dispatch)dispatch {
  const uint64_t block = [command_buffer->queue block];
  if (!state->pipeline.is_set || state->pipeline.block != block) fault("a dispatch without setComputePipelineState:");
  dispatch.function = *((SimPipeline*)state->pipeline.value)->function;
  std::vector<std::shared_ptr<std::vector<std::byte>>> kept;
  for (size_t i = 0; i < simulator::kMaxBuffers; i++) {
    const auto& argument = state->arguments[i];
    if (argument.is_set && argument.block == block) {
      dispatch.buffers[i] = argument.value.bound;
      kept.push_back(argument.value.bytes);
    }
    const auto& length = state->threadgroup_lengths[i];
    if (length.is_set && length.block == block) dispatch.threadgroup_lengths[i] = length.value;
  }
  try {
    simulator::validate(dispatch);
  } catch (const simulator::Fault& problem) {
    fault(problem.what());
  }
  state->unordered.emplace_back(
      [dispatch = std::move(dispatch), kept = std::move(kept)] { simulator::execute(dispatch); });
  if (state->dispatch_type == MTLDispatchTypeSerial) [self order];
}
// Metal may run the dispatches of a concurrent encoder in any order. Here the last one runs first. A dispatch that
// needs the result of another one then finds nothing.
- (void)order {
  for (; !state->unordered.empty(); state->unordered.pop_back())
    [command_buffer push:std::move(state->unordered.back()) bookkeeping:NO];
}
- (void)dispatchThreadgroups:(MTLSize)grid threadsPerThreadgroup:(MTLSize)group {
  [self require:"dispatchThreadgroups:threadsPerThreadgroup:"];
  simulator::Dispatch dispatch;
  dispatch.threadgroups = {grid.width, grid.height, grid.depth};
  dispatch.threads_per_threadgroup = {group.width, group.height, group.depth};
  dispatch.threads = {0, 0, 0};
  [self dispatch:std::move(dispatch)];
}
- (void)dispatchThreads:(MTLSize)grid threadsPerThreadgroup:(MTLSize)group {
  [self require:"dispatchThreads:threadsPerThreadgroup:"];
  auto groups = [](size_t threads, size_t size) { return size ? (threads + size - 1) / size : 0; };
  simulator::Dispatch dispatch;
  dispatch.threadgroups = {groups(grid.width, group.width), groups(grid.height, group.height),
                           groups(grid.depth, group.depth)};
  dispatch.threads_per_threadgroup = {group.width, group.height, group.depth};
  dispatch.threads = {grid.width, grid.height, grid.depth};
  [self dispatch:std::move(dispatch)];
}
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
  [self require:"memoryBarrierWithScope:"];
  [self order];
}
- (void)endEncoding {
  [self require:"endEncoding"];
  [self order];
  state->ended = true;
  command_buffer->state->open_encoder = nil;
}
@end
