#include <cstring>

#include "objects.h"

using simulator::fault;

namespace {

void require_range(const simulator::BufferState& buffer, size_t offset, size_t size, const char* selector) {
  if (offset > buffer.length || size > buffer.length - offset)
    fault(std::string(selector) + ": " + std::to_string(size) + " bytes at offset " + std::to_string(offset) +
          " pass the end of a buffer of " + std::to_string(buffer.length) + " bytes");
}

}  // namespace

@implementation SimBlitEncoder
@synthesize label = _label;
- (instancetype)initWithCommandBuffer:(SimCommandBuffer*)buffer {
  command_buffer = [buffer retain];
  return self;
}
- (void)dealloc {
  if (!ended) command_buffer->state->open_encoder = nil;
  const bool was_open = !ended;
  [command_buffer release];
  [_label release];
  [super dealloc];
  if (was_open) simulator::fault_unless_unwinding("a blit command encoder was released without endEncoding");
}
- (id<MTLDevice>)device {
  return MTLCreateSystemDefaultDevice();
}
- (void)require:(const char*)selector {
  [command_buffer->queue requireQueue:selector];
  if (ended) fault(std::string(selector) + " after endEncoding");
}
- (void)copyFromBuffer:(id<MTLBuffer>)source
          sourceOffset:(NSUInteger)sourceOffset
              toBuffer:(id<MTLBuffer>)destination
     destinationOffset:(NSUInteger)destinationOffset
                  size:(NSUInteger)size {
  constexpr char selector[] = "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:";
  [self require:selector];
  SimBuffer* from = simulator::checked_buffer(source, selector);
  SimBuffer* to = simulator::checked_buffer(destination, selector);
  require_range(*from->state, sourceOffset, size, selector);
  require_range(*to->state, destinationOffset, size, selector);
  [command_buffer use:from];
  [command_buffer use:to];
  const std::byte* first = from->state->data + sourceOffset;
  std::byte* target = to->state->data + destinationOffset;
  [command_buffer push:[=] {
    memmove(target, first, size);
    simulator::memory_written(target, size);
  }
           bookkeeping:NO];
}
- (void)fillBuffer:(id<MTLBuffer>)buffer range:(NSRange)range value:(uint8_t)value {
  constexpr char selector[] = "fillBuffer:range:value:";
  [self require:selector];
  SimBuffer* target = simulator::checked_buffer(buffer, selector);
  require_range(*target->state, range.location, range.length, selector);
  [command_buffer use:target];
  std::byte* first = target->state->data + range.location;
  [command_buffer push:[=] {
    memset(first, value, range.length);
    simulator::memory_written(first, range.length);
  }
           bookkeeping:NO];
}
- (void)endEncoding {
  [self require:"endEncoding"];
  ended = YES;
  command_buffer->state->open_encoder = nil;
}
@end
