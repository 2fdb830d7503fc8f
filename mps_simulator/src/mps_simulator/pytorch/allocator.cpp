#include "allocator.h"

#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <set>

#include "mps_simulator/engine/engine.h"
#include "mps_simulator/foundation/fault.h"
#include "mps_simulator/metal/device.h"
#include "mps_simulator/metal/simulated_mac.h"

namespace simulator {
namespace {

constexpr size_t kGranule = 512;  // PyTorch rounds sizes up to this

size_t rounded(size_t size) { return (size + kGranule - 1) / kGranule * kGranule; }

// Runs in stream order, so that commands queued earlier still see the old content.
void forget_content_of(void* buffer) {
  std::byte* data = buffer_data(buffer);
  const size_t capacity = buffer_capacity(buffer);
  auto forget = [data, capacity] {
    forget_content(data, capacity);
    memory_recycled(data, capacity);
  };
  if (is_buffer_busy(buffer))
    enqueue_bookkeeping(forget, buffer);
  else
    forget();
}

}  // namespace

Allocator& Allocator::instance() {
  static auto* allocator = new Allocator;
  return *allocator;
}

void* Allocator::take_from_pool(size_t size) {
  std::lock_guard lock(mutex_);
  // Takes the smallest block that is large enough, unless more than half of it would stay unused.
  auto found = pool_.lower_bound(rounded(size));
  if (found == pool_.end() || found->first > 2 * rounded(size)) return nullptr;
  void* buffer = found->second;
  pool_.erase(found);
  return buffer;
}

void* Allocator::make(size_t size) {
  const size_t limit = getHighWatermarkLimit();
  auto fits = [&] {
    std::lock_guard lock(mutex_);
    return size <= kMaxBufferLength && reserved_ + rounded(size) <= limit;
  };
  if (!fits()) release_pool();
  void* buffer = fits() ? create_buffer(size, rounded(size)) : nullptr;
  TORCH_CHECK_WITH(OutOfMemoryError, buffer,
                   "MPS backend out of memory (MPS allocated: ", formatSize(getCurrentAllocatedMemory()),
                   ", max allowed: ", formatSize(limit), "). Tried to allocate ", formatSize(size), ".");
  std::lock_guard lock(mutex_);
  reserved_ += rounded(size);
  return buffer;
}

c10::DataPtr Allocator::allocate(size_t size) {
  const c10::Device device(c10::DeviceType::MPS, 0);
  if (size == 0) return {nullptr, nullptr, raw_deleter(), device};
  void* buffer = take_from_pool(size);
  if (buffer) {
    forget_content_of(buffer);  // may wait for the stream's queue, so it must not hold the lock
    set_buffer_length(buffer, size);
  } else {
    buffer = make(size);
  }
  std::lock_guard lock(mutex_);
  used_[buffer] = size;
  current_ += size;
  requested_ += size;
  peak_ = std::max(peak_, current_);
  return {buffer, buffer, raw_deleter(), device};
}

void Allocator::free(void* buffer) {
  std::lock_guard lock(mutex_);
  auto found = used_.find(buffer);
  TORCH_INTERNAL_ASSERT(found != used_.end());
  current_ -= found->second;
  used_.erase(found);
  shapes_.erase(buffer);
  // Inserts the block before blocks of equal size. Queued commands most likely still use the block that was freed last,
  // so it is the first to leave the pool.
  const size_t capacity = buffer_capacity(buffer);
  pool_.emplace_hint(pool_.lower_bound(capacity), capacity, buffer);
}

c10::DeleterFnPtr Allocator::raw_deleter() const {
  return [](void* buffer) {
    if (buffer) instance().free(buffer);
  };
}

void Allocator::copy_data(void* destination, const void* source, size_t count) const {
  std::byte* to = buffer_data(destination);
  const std::byte* from = buffer_data(source);
  enqueue(
      [to, from, count] {
        memcpy(to, from, count);
        memory_written(to, count);
      },
      {destination, source});
}

void Allocator::emptyCache(c10::MempoolId_t) {
  wait_for_stream();
  release_pool();
}

// Queued commands retain the blocks that they use, so a busy block is freed after these commands.
void Allocator::release_pool() {
  std::lock_guard lock(mutex_);
  for (auto& [capacity, buffer] : pool_) {
    reserved_ -= capacity;
    destroy_buffer(buffer);
  }
  pool_.clear();
}

c10::CachingDeviceAllocator::DeviceStats Allocator::getDeviceStats(c10::DeviceIndex) {
  std::lock_guard lock(mutex_);
  c10::CachingDeviceAllocator::DeviceStats stats;
  stats.allocated_bytes[0].current = current_;
  stats.allocated_bytes[0].peak = peak_;
  stats.reserved_bytes[0].current = reserved_;
  return stats;
}

void Allocator::resetPeakStats(c10::DeviceIndex) {
  std::lock_guard lock(mutex_);
  peak_ = current_;
}

std::pair<size_t, size_t> Allocator::getMemoryInfo(c10::DeviceIndex) {
  std::lock_guard lock(mutex_);
  return {kWorkingSetSize - std::min<size_t>(reserved_, kWorkingSetSize), kWorkingSetSize};
}

ssize_t Allocator::getUnalignedBufferSize(const void* buffer) const {
  std::lock_guard lock(mutex_);
  auto found = used_.find(buffer);
  return found == used_.end() ? -1 : static_cast<ssize_t>(found->second);
}

at::IntArrayRef Allocator::getBufferShape(const void* buffer) const {
  std::lock_guard lock(mutex_);
  return shapes_[buffer];
}

void Allocator::setBufferShape(const void* buffer, const at::IntArrayRef& shape) const {
  std::lock_guard lock(mutex_);
  shapes_[buffer] = shape.vec();
}

c10::DataPtr Allocator::allocScalarBufferWithValue(void* value, size_t size) const {
  c10::DataPtr data = instance().allocate(size);
  std::byte* to = buffer_data(data.get());
  std::vector<std::byte> bytes(static_cast<std::byte*>(value), static_cast<std::byte*>(value) + size);
  auto write = [to, bytes] {
    memcpy(to, bytes.data(), bytes.size());
    memory_written(to, bytes.size());
  };
  enqueue_bookkeeping(write, data.get());
  return data;
}

std::string Allocator::formatSize(size_t size) const {
  char text[32];
  snprintf(text, sizeof(text), "%.2f MB", static_cast<double>(size) / (1 << 20));
  return text;
}

void Allocator::setHighWatermarkRatio(double ratio) const { high_watermark_ = ratio; }
ssize_t Allocator::getLowWatermarkValue() const { return kWorkingSetSize; }
size_t Allocator::getLowWatermarkLimit() const { return kWorkingSetSize; }
size_t Allocator::getHighWatermarkLimit() const { return static_cast<size_t>(high_watermark_ * kWorkingSetSize); }

size_t Allocator::getTotalAllocatedMemory() const {
  std::lock_guard lock(mutex_);
  return reserved_;
}
size_t Allocator::getDriverAllocatedMemory() const { return allocated_buffer_bytes(); }
size_t Allocator::getCurrentAllocatedMemory() const {
  std::lock_guard lock(mutex_);
  return current_;
}
size_t Allocator::getRecommendedMaxMemory() const { return kWorkingSetSize; }

size_t Allocator::total_requested() const {
  std::lock_guard lock(mutex_);
  return requested_;
}

std::pair<const void*, uint32_t> Allocator::getSharedBufferPtr(const void* buffer) const {
  if (is_buffer_busy(buffer)) fault("getSharedBufferPtr: the host accesses a buffer with pending work");
  return {buffer_data(buffer), buffer_retain_count(buffer)};
}

c10::Storage Allocator::getHostAliasStorage(const c10::Storage& storage) const {
  const void* buffer = storage.data();
  if (is_buffer_busy(buffer)) fault("getHostAliasStorage: the host accesses a buffer with pending work");
  memory_written(buffer_data(buffer), buffer_length(buffer));  // from now on the host may write, and we do not see it
  auto* keep = new c10::Storage(storage);
  auto drop = [](void* context) { delete static_cast<c10::Storage*>(context); };
  c10::DataPtr data(buffer_data(buffer), keep, drop, c10::Device(c10::DeviceType::CPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data));
}

bool Allocator::waitForEvents(c10::ArrayRef<const void*>) const {
  wait_for_stream();
  return true;
}

// ---- pinned memory: ordinary host memory that we keep a list of ----

namespace {

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    void* data = c10::GetDefaultCPUAllocator()->raw_allocate(size);
    std::lock_guard lock(mutex_);
    live_.insert(data);
    return {data, data, raw_deleter(), c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* data) { static_cast<PinnedAllocator&>(pinned_allocator()).free(data); };
  }
  void copy_data(void* destination, const void* source, size_t count) const override {
    memcpy(destination, source, count);
  }
  bool holds(const void* data) {
    std::lock_guard lock(mutex_);
    return live_.count(data) > 0;
  }

 private:
  void free(void* data) {
    {
      std::lock_guard lock(mutex_);
      live_.erase(data);
    }
    c10::GetDefaultCPUAllocator()->raw_deallocate(data);
  }

  std::mutex mutex_;
  std::set<const void*> live_;
};

[[maybe_unused]] const bool kRegistered = [] {
  c10::SetAllocator(c10::DeviceType::MPS, &Allocator::instance());
  return true;
}();

}  // namespace

at::Allocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

bool is_pinned(const void* data) { return static_cast<PinnedAllocator&>(pinned_allocator()).holds(data); }

}  // namespace simulator

namespace at::mps {
TORCH_API IMPSAllocator* getIMPSAllocator() { return &simulator::Allocator::instance(); }
TORCH_API at::Allocator* GetMPSAllocator() { return &simulator::Allocator::instance(); }
bool isMPSPinnedPtr(const void* data) { return simulator::is_pinned(data); }
}  // namespace at::mps
