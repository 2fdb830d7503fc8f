// The classes behind Metal's protocols, with the methods that the protocols do not have. For Objective-C++ only.
#pragma once
#import <Metal/Metal.h>
#import <MetalPerformanceShaders/MetalPerformanceShaders.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "mps_simulator/engine/engine.h"
#include "mps_simulator/foundation/fault.h"

namespace simulator {

struct BufferState {
  std::byte* data;
  size_t length;  // as requested; the block may be larger, but the watch checks this bound
  size_t capacity;
  uint64_t serial;              // unique per buffer, even if two buffers have the same address
  std::atomic<int> pending{0};  // command buffers that use it and have not completed
  std::atomic<int> owners{0};   // retains by the allocator and by command buffers
};

bool is_live_buffer(const void* object, uint64_t* serial = nullptr);

struct Command {
  std::function<void()> work;
  bool bookkeeping;  // runs even if a fault drops the rest of the command buffer
};

struct CommandBufferState {
  MTLCommandBufferStatus status = MTLCommandBufferStatusNotEnqueued;
  bool retained_references = true;
  std::vector<Command> commands;
  std::unordered_map<id, uint64_t> buffers;  // the buffers that commands use, with their serials
  std::vector<id> others;                    // pipelines
  std::vector<MTLCommandBufferHandler> handlers;
  id open_encoder = nil;
  std::string error;
  double start_time = 0, end_time = 0;  // in seconds; 0 before the command buffer runs
};

// An argument is valid until the end of the block that set it, because the next op on PyTorch's stream may end the
// encoder.
template <typename Value>
struct Setting {
  Value value{};
  uint64_t block = 0;
  bool is_set = false;
};

struct Argument {
  BoundArgument bound;
  id buffer = nil;
  std::shared_ptr<std::vector<std::byte>> bytes;
};

struct ComputeEncoderState {
  bool ended = false;
  MTLDispatchType dispatch_type = MTLDispatchTypeSerial;
  std::vector<std::function<void()>> unordered;  // dispatches of a concurrent encoder after its last barrier
  Setting<id> pipeline;
  std::array<Setting<Argument>, kMaxBuffers> arguments;
  std::array<Setting<size_t>, kMaxBuffers> threadgroup_lengths;
};

extern std::atomic<uint64_t> commands_encoded, commands_completed;

}  // namespace simulator

@interface SimDevice : NSObject <MTLDevice>
@end

@interface SimBuffer : NSObject <MTLBuffer> {
 @public
  simulator::BufferState* state;
  NSString* _label;
}
@property(copy, atomic) NSString* label;
- (instancetype)initWithLength:(size_t)length capacity:(size_t)capacity;
- (void)own;     // retains, and counts the owner
- (void)disown;  // releases, and removes the owner
@end

@interface SimFunction : NSObject <MTLFunction> {
 @public
  std::shared_ptr<const simulator::Function>* function;
  NSString* _label;
}
@property(copy, atomic) NSString* label;
@end

@interface SimLibrary : NSObject <MTLLibrary> {
 @public
  std::shared_ptr<const simulator::Program>* program;
  NSString* _label;
}
@property(copy, atomic) NSString* label;
- (instancetype)initWithProgram:(std::shared_ptr<const simulator::Program>)program;
@end

@interface SimPipeline : NSObject <MTLComputePipelineState> {
 @public
  std::shared_ptr<const simulator::Function>* function;
}
- (instancetype)initWithFunction:(SimFunction*)function;
@end

@class SimCommandBuffer;

@interface SimCommandQueue : NSObject <MTLCommandQueue> {
 @public
  std::deque<SimCommandBuffer*>* submitted;
  // The queue of PyTorch's stream; only its blocks may encode. Null for other command queues.
  dispatch_queue_t serial_queue;
  NSString* _label;
}
@property(copy, atomic) NSString* label;
- (void)requireQueue:(const char*)action;
- (uint64_t)block;
- (void)drainThrough:(SimCommandBuffer*)last;
@end

@interface SimCommandBuffer : NSObject <MTLCommandBuffer> {
 @public
  SimCommandQueue* queue;
  simulator::CommandBufferState* state;
  NSString* _label;
}
@property(copy, atomic) NSString* label;
- (instancetype)initWithQueue:(SimCommandQueue*)queue retainedReferences:(BOOL)retained;
- (void)push:(std::function<void()>)work bookkeeping:(BOOL)bookkeeping;
- (void)use:(SimBuffer*)buffer;
- (void)requireIdle:(const char*)action;  // checks that it is not committed and no encoder is open
- (void)run;
- (void)abandon:(const std::string&)reason;
@end

@interface SimComputeEncoder : NSObject <MTLComputeCommandEncoder> {
 @public
  SimCommandBuffer* command_buffer;
  simulator::ComputeEncoderState* state;
  NSString* _label;
}
@property(copy, atomic) NSString* label;
- (instancetype)initWithCommandBuffer:(SimCommandBuffer*)buffer dispatchType:(MTLDispatchType)type;
- (void)order;  // makes earlier dispatches run before later ones
@end

@interface SimBlitEncoder : NSObject <MTLBlitCommandEncoder> {
 @public
  SimCommandBuffer* command_buffer;
  BOOL ended;
  NSString* _label;
}
@property(copy, atomic) NSString* label;
- (instancetype)initWithCommandBuffer:(SimCommandBuffer*)buffer;
@end

@interface MTLFunctionConstantValues (Simulator)
- (simulator::FunctionConstants&)constants;  // the values that specialise a shader, by index
@end

namespace simulator {

// Returns `object` as a buffer. If it is not one, raises a fault that names the selector.
SimBuffer* checked_buffer(id object, const char* selector);

}  // namespace simulator
