// One operating-system thread's share of a dispatch. It runs whole threadgroups, with one Metal thread per fiber.
//
// A thread runs until it waits. The worker then chooses a ready thread: the lowest one for seed 0, otherwise a random
// one. It leaves a simdgroup only if none of its lanes is ready or, at random, when a rendezvous is complete. If no
// thread is ready and some wait, the threads have diverged.
#pragma once
#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fibers.h"
#include "job.h"
#include "mps_simulator/engine/watch/watch.h"
#include "random.h"
#include "threadgroup_memory.h"

namespace simulator {

struct Wait {
  enum Kind : uint8_t { none, threadgroup_barrier, simdgroup_barrier, collective };
  Kind kind = none;
  const char* operation = nullptr;
  const void* site = nullptr;  // the kernel's call site: barriers in two branches are two barriers
  uint32_t scope = 0;

  bool same_as(const Wait& other) const;
};

class Worker {
 public:
  Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Runs threadgroups of the job until none is left or one fails. A failure stops the job, and fault() returns it.
  void run(Job& job);
  const std::string& fault() const { return fault_; }
  const KernelFigures& figures() const { return figures_; }

  // ---- called by kernels, on a fiber ----
  void threadgroup_barrier(uint32_t scope, const void* site);
  void simdgroup_barrier(uint32_t scope, const void* site);
  void collective(const char* operation, const void* site, void* slot, simulator_combine combine);
  void* threadgroup_array(const char* name, size_t size, size_t alignment);
  const uint8_t* reduction_order();
  void count_multiply() { ++figures_.matrix_multiplies; }
  const Settings& settings() const { return job_->settings; }

  // Ends the threadgroup and abandons its fibers.
  [[noreturn]] void fail(std::string text);
  // Does the same, and also names the kernel and the thread that runs.
  [[noreturn]] void fail_in_kernel(const std::string& what);
  // Returns "thread (0, 0, 0) of threadgroup (0, 0, 0)".
  std::string name_thread(uint32_t index) const;
  simulator_uint3 position(uint32_t index) const { return thread_position(index, group_size_); }
  simulator_uint3 position_in(uint32_t index, uint64_t group) const {
    return thread_position(index, job_->group_size(job_->group_position(group)));
  }

 private:
  struct Lane {
    Fiber* fiber = nullptr;  // null before the thread begins
    bool returned = false;
  };
  struct Simdgroup {
    uint32_t lanes = 0, ready = 0, arrived = 0;  // one bit for each lane
    LaneOrder order;
    Wait wait;
    simulator_combine combine = nullptr;  // the operation that the lanes wait for, unless it is a barrier
    uint64_t rendezvous = 0;
  };
  // Memory that kernels reach through the runtime's pointers. It lies inside the fiber pool's mapping.
  struct Scratch {
    void* slots[32][32];
    void* arguments[256];
    uint8_t order[32];
  };

  friend void fiber_entry();
  [[noreturn]] void run_lanes();
  void run_kernel(uint32_t index);

  void begin_dispatch(Job& job);
  void run_threadgroup(uint64_t index);

  Scratch& scratch() const { return *reinterpret_cast<Scratch*>(fibers_.scratch()); }
  bool arrive_in_simdgroup(Simdgroup& simdgroup, const Wait& wait, simulator_combine combine);
  void complete_simdgroup(uint32_t simdgroup);
  bool complete_with_active_lanes();
  void go_on();

  void make_ready(uint32_t simdgroup, uint32_t lanes) {
    simdgroups_[simdgroup].ready = lanes;
    simdgroups_[simdgroup].order.restart(seed_ == 0 ? 0 : random_.next());
    ready_simdgroups_ |= 1u << simdgroup;
  }
  void make_unready(uint32_t lane) {
    Simdgroup& simdgroup = simdgroups_[lane / 32];
    simdgroup.ready &= ~(1u << lane % 32);
    if (simdgroup.ready == 0) ready_simdgroups_ &= ~(1u << lane / 32);
  }
  void leave_simdgroup() {
    current_simdgroup_ =
        seed_ == 0 ? uint32_t(std::countr_zero(ready_simdgroups_)) : random_.pick_bit(ready_simdgroups_);
  }
  // Sets current_. Returns false if no thread can continue.
  bool find_next() { return choose_next() || (complete_with_active_lanes() && choose_next()); }
  bool choose_next() {
    if (ready_simdgroups_ == 0) return false;
    if (simdgroups_[current_simdgroup_].ready == 0) leave_simdgroup();
    Simdgroup& simdgroup = simdgroups_[current_simdgroup_];
    uint32_t lane = simdgroup.order.next();
    while (!(simdgroup.ready >> lane & 1)) lane = simdgroup.order.next();
    current_ = current_simdgroup_ * 32 + lane;
    watch_.set_thread(current_);
    return true;
  }

  const Wait* waits_at(uint32_t lane) const;  // null if the lane has returned
  std::string diverged(const Wait& here, const Wait& there, uint32_t other) const;
  std::string stuck() const;

  FiberPool fibers_;
  Fiber main_;
  Job* job_ = nullptr;
  KernelFigures figures_;
  std::string fault_;
  ThreadgroupMemory memory_;
  Watch watch_;

  std::array<Lane, kMaxThreads> lanes_;
  std::array<Simdgroup, kMaxThreads / 32> simdgroups_;
  uint32_t lane_count_ = 0, returned_ = 0, at_barrier_ = 0;
  uint32_t current_ = 0;  // the lane that runs or is chosen to run next
  uint32_t current_simdgroup_ = 0;
  uint32_t ready_simdgroups_ = 0;  // one bit for each simdgroup with a ready lane
  Wait barrier_;
  uint32_t first_at_barrier_ = 0;
  uint64_t group_index_ = 0, seed_ = 0;
  simulator_uint3 group_position_{}, group_size_{};
  Random random_;
};

// The worker whose threadgroup runs on this operating-system thread, or null.
extern constinit thread_local Worker* current_worker __attribute__((tls_model("initial-exec")));

}  // namespace simulator
