#include "worker.h"

#include <algorithm>
#include <numeric>

#include "denormals.h"
#include "mps_simulator/engine/watch/private_memory.h"

namespace simulator {

constinit thread_local Worker* current_worker __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

uint32_t first_bits(uint32_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

}  // namespace

Worker::Worker() : watch_(*this) {
  static_assert(sizeof(Scratch) <= FiberPool::kScratchSize);
  handle_traps_of_kernels();
}

void Worker::run(Job& job) {
  try {
    begin_dispatch(job);
  } catch (const std::exception& error) {
    fault_ = "kernel '" + std::string(job.kernel.name) + "': the simulator can't begin: " + error.what();
    job.stopped = true;
  }
  current_worker = this;
  const bool flushed_before = flush_denormals(job.settings.perturb);
  const uint64_t count = job.threadgroups.count();
  while (!job.stopped.load(std::memory_order_relaxed)) {
    const uint64_t index = job.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= count) break;
    run_threadgroup(index);
    if (!fault_.empty()) job.stopped = true;
  }
  flush_denormals(flushed_before);
  current_worker = nullptr;
  figures_.threadgroup_memory = memory_.total();
  watch_.end_dispatch(figures_);
}

void Worker::begin_dispatch(Job& job) {
  job_ = &job;
  seed_ = job.settings.seed;
  figures_ = {};
  fault_.clear();
  fibers_.reserve(job.dispatch.threads_per_threadgroup.count());
  memory_.begin_dispatch(seed_);
  watch_.begin_dispatch(job, fibers_);
  const simulator_kernel& kernel = job.kernel;
  for (uint32_t i = 0; i < kernel.parameter_count; ++i) {
    const simulator_parameter& parameter = kernel.parameters[i];
    void* data = nullptr;
    if (parameter.kind == simulator_buffer) {
      data = job.layout ? job.layout->data[parameter.index] : job.dispatch.buffers[parameter.index].data;
    } else if (parameter.kind == simulator_threadgroup_memory &&
               job.dispatch.threadgroup_lengths[parameter.index] > 0) {
      const auto& array = memory_.add(parameter.name, job.dispatch.threadgroup_lengths[parameter.index],
                                      parameter.value_alignment, parameter.value_size, int32_t(parameter.index));
      watch_.add_threadgroup_array(array);
      data = array.data;
    }
    scratch().arguments[i] = data;
  }
}

void Worker::run_threadgroup(uint64_t index) {
  group_index_ = index;
  random_ = Random(seed_ ^ mix(index));
  group_position_ = job_->group_position(index);
  group_size_ = job_->group_size(group_position_);
  lane_count_ = group_size_.x * group_size_.y * group_size_.z;
  returned_ = at_barrier_ = 0;
  std::fill_n(lanes_.begin(), lane_count_, Lane{});
  ready_simdgroups_ = 0;
  std::fill_n(&scratch().slots[0][0], kMaxThreads, nullptr);
  const uint32_t simdgroup_count = (lane_count_ + 31) / 32;
  for (uint32_t i = 0; i < simdgroup_count; ++i) {
    simdgroups_[i] = {};
    simdgroups_[i].lanes = first_bits(lane_count_ - i * 32);
    make_ready(i, simdgroups_[i].lanes);
  }
  memory_.poison();
  watch_.begin_threadgroup(index);
  ++figures_.threadgroups;
  figures_.threads += lane_count_;

  leave_simdgroup();
  choose_next();
  lanes_[current_].fiber = fibers_.take();
  switch_fiber(main_, *lanes_[current_].fiber);

  watch_.end_threadgroup();
  if (fault_.empty() && returned_ < lane_count_) fault_ = stuck();
  if (!fault_.empty()) fibers_.renew();
}

void fiber_entry() { current_worker->run_lanes(); }

// Every fiber runs this function. It runs one thread after another, until the next thread to run is in another fiber.
void Worker::run_lanes() {
  for (;;) {
    Lane& lane = lanes_[current_];
    Fiber* const fiber = lane.fiber;
    run_kernel(current_);
    lane.returned = true;
    lane.fiber = nullptr;
    ++returned_;
    make_unready(current_);
    if (!find_next()) {
      fibers_.give_back(fiber);
      switch_fiber(*fiber, main_);
    } else if (lanes_[current_].fiber) {
      fibers_.give_back(fiber);
      switch_fiber(*fiber, *lanes_[current_].fiber);
    } else {
      lanes_[current_].fiber = fiber;
    }
  }
}

void Worker::run_kernel(uint32_t index) {
  const Dispatch& dispatch = job_->dispatch;
  const auto size = [](const Size& s) {
    return simulator_uint3{uint32_t(s.width), uint32_t(s.height), uint32_t(s.depth)};
  };
  const simulator_uint3 full = size(dispatch.threads_per_threadgroup);
  simulator_thread thread;
  thread.thread_position_in_threadgroup = thread_position(index, group_size_);
  thread.threadgroup_position_in_grid = group_position_;
  thread.thread_position_in_grid = {group_position_.x * full.x + thread.thread_position_in_threadgroup.x,
                                    group_position_.y * full.y + thread.thread_position_in_threadgroup.y,
                                    group_position_.z * full.z + thread.thread_position_in_threadgroup.z};
  thread.threads_per_threadgroup = group_size_;
  thread.threadgroups_per_grid = size(job_->threadgroups);
  thread.threads_per_grid = size(job_->threads);
  thread.thread_index_in_threadgroup = index;
  thread.thread_index_in_simdgroup = index % 32;
  thread.simdgroup_index_in_threadgroup = index / 32;
  thread.simdgroups_per_threadgroup = (lane_count_ + 31) / 32;
  thread.threads_per_simdgroup = 32;
  flush_denormals(settings().perturb);  // for each thread, because the switch between fibers may preserve this register
  job_->kernel.run(scratch().arguments, &thread);
}

void Worker::fail(std::string text) {
  fault_ = std::move(text);
  Fiber abandoned;
  switch_fiber(abandoned, main_);
  __builtin_unreachable();
}

void* Worker::threadgroup_array(const char* name, size_t size, size_t alignment) {
  if (const auto* array = memory_.find(name, size)) return array->data;
  if (memory_.total() + size > kMaxThreadgroupMemory || memory_.is_full()) {
    fail("kernel '" + std::string(job_->kernel.name) + "': threadgroup memory: array '" + name + "' of " +
         std::to_string(size) + " bytes makes " + std::to_string(memory_.total() + size) +
         " bytes in all, expected at most " + std::to_string(kMaxThreadgroupMemory));
  }
  const auto& array = memory_.add(name, size, alignment, alignment, -1);
  watch_.add_threadgroup_array(array);
  return array.data;
}

// All lanes of a simdgroup get the same order until their next rendezvous, whatever order they run in.
const uint8_t* Worker::reduction_order() {
  uint8_t* order = scratch().order;
  std::iota(order, order + 32, uint8_t{0});
  if (!settings().perturb) return order;
  const uint64_t occasion = mix(group_index_) ^ mix(current_ / 32 + (simdgroups_[current_ / 32].rendezvous << 5));
  Random random(mix(seed_) ^ occasion);
  for (uint32_t i = 31; i > 0; --i) std::swap(order[i], order[random.next() % (i + 1)]);
  return order;
}

}  // namespace simulator
