#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "device.h"
#include "mps_simulator/engine/pages.h"
#include "objects.h"
#include "simulated_mac.h"

namespace simulator {
namespace {

std::mutex live_mutex;
std::atomic<size_t> allocated_bytes{0};

std::unordered_map<const void*, uint64_t>& live_buffers() {
  static auto* buffers = new std::unordered_map<const void*, uint64_t>;
  return *buffers;
}

uint64_t register_buffer(const void* object) {
  static uint64_t last_serial = 0;
  std::lock_guard lock(live_mutex);
  return live_buffers()[object] = ++last_serial;
}

// A buffer of at least this size uses memory only for the pages that are written, and has no poison.
bool is_sparse(size_t capacity) { return capacity >= size_t{1} << 30; }

// Returns memory with Metal's alignment of buffers, 256 bytes, or null if there is not enough memory.
std::byte* new_memory(size_t capacity) {
  if (is_sparse(capacity)) return new_pages(capacity);
  const size_t size = std::max<size_t>((capacity + 255) / 256 * 256, 256);
  auto* data = static_cast<std::byte*>(std::aligned_alloc(256, size));
  if (data) forget_content(data, size);
  return data;
}

void free_memory(std::byte* data, size_t capacity) {
  if (is_sparse(capacity)) return free_pages(data, capacity);
  std::free(data);
}

void forget_buffer(const void* object) {
  std::lock_guard lock(live_mutex);
  live_buffers().erase(object);
}

}  // namespace

void forget_content(std::byte* data, size_t capacity) {
  if (is_sparse(capacity)) return forget_pages(data, capacity);
  memset(data, 0xFF, capacity);
}

bool is_live_buffer(const void* object, uint64_t* serial) {
  std::lock_guard lock(live_mutex);
  auto found = live_buffers().find(object);
  if (found == live_buffers().end()) return false;
  if (serial) *serial = found->second;
  return true;
}

SimBuffer* checked_buffer(id object, const char* selector) {
  if (!is_live_buffer(object))
    fault(std::string(selector) + ": not a live MTLBuffer (a deallocated one, or memory of a CPU tensor)");
  return (SimBuffer*)object;
}

size_t allocated_buffer_bytes() { return allocated_bytes; }

}  // namespace simulator

using simulator::fault;

@implementation SimBuffer
@synthesize label = _label;
- (instancetype)initWithLength:(size_t)length capacity:(size_t)capacity {
  std::byte* data = simulator::new_memory(capacity);
  if (!data) return nil;
  state = new simulator::BufferState{data, length, capacity, simulator::register_buffer(self)};
  simulator::memory_created(data, capacity);
  simulator::allocated_bytes += capacity;
  return self;
}
- (NSUInteger)length {
  return state->length;
}
- (void*)contents {
  if (state->pending)
    fault("-[MTLBuffer contents]: the host accesses a buffer of " + std::to_string(state->length) +
          " bytes that a command buffer uses which has not completed: wait for it first");
  // From now on, the caller may write through the pointer, and we do not see it.
  simulator::memory_written(state->data, state->length);
  return state->data;
}
- (uint64_t)gpuAddress {
  return reinterpret_cast<uint64_t>(state->data);
}
- (MTLStorageMode)storageMode {
  return MTLStorageModeShared;
}
- (id<MTLDevice>)device {
  return MTLCreateSystemDefaultDevice();
}
- (void)own {
  state->owners++;
  [self retain];
}
- (void)disown {
  state->owners--;
  [self release];
}
- (void)dealloc {
  if (const int owners = state ? state->owners.load() : 0) {
    _retain_count = owners;
    simulator::fault_unless_unwinding(
        "MTLBuffer is over-released: PyTorch's allocator or a command buffer still holds it");
    return;
  }
  if (state) {
    simulator::forget_buffer(self);
    simulator::memory_destroyed(state->data);
    simulator::free_memory(state->data, state->capacity);
    simulator::allocated_bytes -= state->capacity;
    delete state;
  }
  [_label release];
  [super dealloc];
}
@end
