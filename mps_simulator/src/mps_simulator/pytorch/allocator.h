// Allocates device memory for tensors. As in PyTorch's MPSAllocator, a block returns to the pool when its tensor is
// freed, even while queued commands use it. Its next use comes later on the same stream.
#pragma once
#include <ATen/mps/MPSAllocatorInterface.h>

#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace simulator {

class Allocator final : public at::mps::IMPSAllocator {
 public:
  static Allocator& instance();

  c10::DataPtr allocate(size_t size) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* destination, const void* source, size_t count) const override;

  // c10::DeviceAllocator
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override;
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // there is one stream
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override;
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override;

  // at::mps::IMPSAllocator
  void freeInactiveBuffers() const override {}
  ssize_t getUnalignedBufferSize(const void* buffer) const override;
  at::IntArrayRef getBufferShape(const void* buffer) const override;
  id_t getBufferId(const void*) const override { return 0; }
  void setBufferShape(const void* buffer, const at::IntArrayRef& shape) const override;
  bool isSharedBuffer(const void*) const override { return true; }
  c10::DataPtr allocScalarBufferWithValue(void* value, size_t size) const override;
  std::string formatSize(size_t size) const override;
  void setLowWatermarkRatio(double) const override {}
  void setHighWatermarkRatio(double ratio) const override;
  ssize_t getLowWatermarkValue() const override;
  size_t getLowWatermarkLimit() const override;
  size_t getHighWatermarkLimit() const override;
  size_t getTotalAllocatedMemory() const override;
  size_t getCurrentAllocatedMemory() const override;
  size_t getDriverAllocatedMemory() const override;
  size_t getRecommendedMaxMemory() const override;
  std::pair<const void*, uint32_t> getSharedBufferPtr(const void* buffer) const override;
  c10::Storage getHostAliasStorage(const c10::Storage& storage) const override;
  bool recordEvents(c10::ArrayRef<const void*>) const override { return false; }
  bool waitForEvents(c10::ArrayRef<const void*>) const override;

  size_t total_requested() const;  // bytes of all allocations so far

 private:
  void* take_from_pool(size_t size);  // null if no block fits
  void* make(size_t size);
  void free(void* buffer);
  void release_pool();

  mutable std::mutex mutex_;
  std::multimap<size_t, void*> pool_;  // sorted by capacity
  mutable std::unordered_map<const void*, std::vector<int64_t>> shapes_;
  std::unordered_map<const void*, size_t> used_;
  size_t current_ = 0, peak_ = 0, reserved_ = 0, requested_ = 0;
  mutable double high_watermark_ = 1.7;  // as a multiple of the working set; PyTorch's default
};

at::Allocator& pinned_allocator();
bool is_pinned(const void* data);

}  // namespace simulator
