// The rest of PyTorch finds the device through two tables, MPSHooks and the device guard. It must not find a device
// through CUDA's hooks.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <map>
#include <mutex>

#include "allocator.h"
#include "event.h"
#include "generator.h"
#include "mps_simulator/metal/device.h"
#include "mps_simulator/metal/simulated_mac.h"

namespace simulator {
namespace {

const c10::Device kDevice(c10::DeviceType::MPS, 0);

// The events of torch.mps.Event, by number.
class EventTable {
 public:
  uint32_t add() {
    std::lock_guard lock(mutex_);
    events_[++last_];
    return last_;
  }
  void remove(uint32_t number) {
    std::lock_guard lock(mutex_);
    events_.erase(number);
  }
  Event& at(uint32_t number) {
    std::lock_guard lock(mutex_);
    auto found = events_.find(number);
    TORCH_CHECK(found != events_.end(), "no MPS event ", number);
    return found->second;
  }
  static EventTable& instance() {
    static auto* table = new EventTable;
    return *table;
  }

 private:
  std::mutex mutex_;
  std::map<uint32_t, Event> events_;
  uint32_t last_ = 0;
};

struct Hooks final : at::MPSHooksInterface {
  void init() const override {}
  bool hasMPS() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isOnMacOSorNewer(unsigned major, unsigned minor) const override {
    return std::pair(kMacOSMajor, kMacOSMinor) >= std::pair(major, minor);
  }

  c10::DeviceIndex deviceCount() const override { return 1; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }

  void deviceSynchronize() const override { wait_for_stream(); }
  void commitStream() const override { commit_stream(); }
  void* getCommandBuffer() const override { return stream_command_buffer(); }
  void* getDispatchQueue() const override { return stream_queue(); }

  at::Allocator* getMPSDeviceAllocator() const override { return &Allocator::instance(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  void emptyCache() const override { Allocator::instance().emptyCache(); }
  size_t getCurrentAllocatedMemory() const override { return Allocator::instance().getCurrentAllocatedMemory(); }
  size_t getDriverAllocatedMemory() const override { return Allocator::instance().getDriverAllocatedMemory(); }
  size_t getRecommendedMaxMemory() const override { return kWorkingSetSize; }
  size_t getMaxBufferLength() const override { return kMaxBufferLength; }
  void setMemoryFraction(double ratio) const override { Allocator::instance().setHighWatermarkRatio(ratio); }

  void profilerStartTrace(const std::string&, bool) const override {}
  void profilerStopTrace() const override {}

  uint32_t acquireEvent(bool) const override { return EventTable::instance().add(); }
  void releaseEvent(uint32_t number) const override { EventTable::instance().remove(number); }
  void recordEvent(uint32_t number) const override { EventTable::instance().at(number).record(); }
  void waitForEvent(uint32_t) const override {}  // there is one stream, so later commands wait anyway
  void synchronizeEvent(uint32_t number) const override { EventTable::instance().at(number).synchronize(); }
  bool queryEvent(uint32_t number) const override { return EventTable::instance().at(number).query(); }
  double elapsedTimeOfEvents(uint32_t first, uint32_t last) const override {
    return EventTable::instance().at(first).milliseconds_until(EventTable::instance().at(last));
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::MPS;
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  static Event* event(void* handle) { return static_cast<Event*>(handle); }

  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override { TORCH_CHECK(device.is_mps(), "expected mps, got ", device); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  bool queryStream(const c10::Stream&) const override { return is_stream_idle(); }
  void synchronizeStream(const c10::Stream&) const override { wait_for_stream(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_for_stream(); }

  void record(void** handle, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*handle) *handle = new Event;
    event(*handle)->record();
  }
  void block(void*, const c10::Stream&) const override {}  // there is one stream
  bool queryEvent(void* handle) const override { return !handle || event(handle)->query(); }
  void synchronizeEvent(void* handle) const override {
    if (handle) event(handle)->synchronize();
  }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && last, "elapsed time of events that were not recorded");
    return event(first)->milliseconds_until(*event(last));
  }
  void destroyEvent(void* handle, const c10::DeviceIndex) const noexcept override { delete event(handle); }
};

C10_REGISTER_GUARD_IMPL(MPS, Guard)

}  // namespace
}  // namespace simulator

namespace at {
using simulator_Hooks = ::simulator::Hooks;
C10_REGISTER_CLASS(MPSHooksRegistry, MPSHooks, simulator_Hooks)
}  // namespace at

namespace simulator {

// PyTorch makes its only hooks object when something first asks whether mps is available. This may happen before this
// library is loaded. No class of hooks has data members, so we replace the object's vtable.
template <typename Ours, typename Interface>
static void take_over(const Interface& theirs) {
  static const Ours ours;
  static_assert(sizeof(Ours) == sizeof(void*) && sizeof(Interface) == sizeof(void*));
  memcpy(const_cast<void*>(static_cast<const void*>(&theirs)), static_cast<const void*>(&ours), sizeof(void*));
}

// PyTorch refuses two accelerators ("Cannot have both MPS and cuda", in opcheck and torch.compile). In the usual Linux
// wheel, CUDA's hooks report that CUDA is built in, even without a GPU. We replace them by the hooks of a build without
// CUDA.
struct NoCuda final : at::CUDAHooksInterface {};

[[maybe_unused]] static const bool kInstalled = [] {
  take_over<Hooks>(at::detail::getMPSHooks());
  take_over<NoCuda>(at::detail::getCUDAHooks());
  return true;
}();

}  // namespace simulator
