// Makes threads wait for each other, with the functions of kernel_abi.h that do so. They are all in one file so that
// they are inlined: this code runs 32 times for every simd operation.
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "mps_simulator/engine/kernel_abi.h"
#include "worker.h"

namespace simulator {

bool Wait::same_as(const Wait& other) const {
  return kind == other.kind && site == other.site && scope == other.scope &&
         (operation == other.operation || std::strcmp(operation, other.operation) == 0);
}

// Runs other threads until this one is ready and chosen.
[[gnu::always_inline]] inline void Worker::go_on() {
  const uint32_t mine = current_;
  if (!find_next()) [[unlikely]]
    fail(stuck());
  if (current_ == mine) return;
  Lane& next = lanes_[current_];
  if (!next.fiber) [[unlikely]]
    next.fiber = fibers_.take();
  switch_fiber(*lanes_[mine].fiber, *next.fiber);
}

// Returns true for the last lane of the simdgroup.
[[gnu::always_inline]] inline bool Worker::arrive_in_simdgroup(Simdgroup& simdgroup, const Wait& wait,
                                                               simulator_combine combine) {
  if (simdgroup.arrived == 0) {
    simdgroup.wait = wait;
    simdgroup.combine = combine;
  } else if (!simdgroup.wait.same_as(wait)) [[unlikely]] {
    fail(diverged(wait, simdgroup.wait, current_ / 32 * 32 + uint32_t(std::countr_zero(simdgroup.arrived))));
  }
  simdgroup.arrived |= 1u << current_ % 32;
  make_unready(current_);
  return simdgroup.arrived == simdgroup.lanes;
}

// Does the work that the lanes have arrived for, and lets them continue.
[[gnu::always_inline]] inline void Worker::complete_simdgroup(uint32_t index) {
  Simdgroup& simdgroup = simdgroups_[index];
  if (simdgroup.combine) {
    ++figures_.collectives;
    simdgroup.combine(scratch().slots[index]);
  } else {
    watch_.simdgroup_barrier(index, simdgroup.wait.scope);
  }
  const uint32_t lanes = std::exchange(simdgroup.arrived, 0);
  ++simdgroup.rendezvous;
  watch_.simdgroup_together(index, simdgroup.wait.operation, simdgroup.wait.site);
  make_ready(index, lanes);
  if (seed_ != 0 && random_.next() % 2 == 0) leave_simdgroup();
}

// Called when no thread can continue. If the settings allow it, completes the operation of one simdgroup without the
// lanes that wait elsewhere or have returned. Returns whether a thread can now continue.
bool Worker::complete_with_active_lanes() {
  if (settings().all_lanes) return false;
  for (uint32_t index = 0; index * 32 < lane_count_; ++index) {
    const uint32_t active = simdgroups_[index].arrived;
    if (active == 0) continue;
    current_ = index * 32 + uint32_t(std::countr_zero(active));
    for (uint32_t lane = 0; lane < 32; ++lane) {
      if (!(active >> lane & 1)) scratch().slots[index][lane] = nullptr;
    }
    complete_simdgroup(index);
    return true;
  }
  return false;
}

[[gnu::always_inline]] inline void Worker::simdgroup_barrier(uint32_t scope, const void* site) {
  Simdgroup& simdgroup = simdgroups_[current_ / 32];
  const Wait wait{Wait::simdgroup_barrier, "simdgroup_barrier", site, scope};
  if (arrive_in_simdgroup(simdgroup, wait, nullptr)) complete_simdgroup(current_ / 32);
  go_on();
}

[[gnu::always_inline]] inline void Worker::collective(const char* operation, const void* site, void* slot,
                                                      simulator_combine combine) {
  Simdgroup& simdgroup = simdgroups_[current_ / 32];
  void** slots = scratch().slots[current_ / 32];
  slots[current_ % 32] = slot;
  if (arrive_in_simdgroup(simdgroup, {Wait::collective, operation, site, 0}, combine)) {
    complete_simdgroup(current_ / 32);
  }
  go_on();
}

[[gnu::always_inline]] inline void Worker::threadgroup_barrier(uint32_t scope, const void* site) {
  const Wait wait{Wait::threadgroup_barrier, "threadgroup_barrier", site, scope};
  if (at_barrier_ == 0) {
    barrier_ = wait;
    first_at_barrier_ = current_;
  } else if (!barrier_.same_as(wait)) [[unlikely]] {
    fail(diverged(wait, barrier_, first_at_barrier_));
  }
  make_unready(current_);
  if (++at_barrier_ == lane_count_) {
    at_barrier_ = 0;
    ++figures_.barriers;
    watch_.threadgroup_barrier(scope);
    for (uint32_t i = 0; i * 32 < lane_count_; ++i) make_ready(i, simdgroups_[i].lanes);
    leave_simdgroup();
  }
  go_on();
}

}  // namespace simulator

using simulator::current_worker;

extern "C" {

void simulator_threadgroup_barrier(uint32_t memory_scope) {
  current_worker->threadgroup_barrier(memory_scope, __builtin_return_address(0));
}

void simulator_simdgroup_barrier(uint32_t memory_scope) {
  current_worker->simdgroup_barrier(memory_scope, __builtin_return_address(0));
}

void simulator_collective(const char* operation, const void* site, void* slot, simulator_combine combine) {
  current_worker->collective(operation, site, slot, combine);
}

}  // extern "C"
