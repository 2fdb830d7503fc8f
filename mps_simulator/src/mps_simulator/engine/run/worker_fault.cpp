#include <algorithm>
#include <string>

#include "worker.h"

namespace simulator {
namespace {

std::string scope_name(uint32_t scope) {
  std::string name;
  const auto add = [&](uint32_t bit, const char* text) {
    if (scope & bit) name += (name.empty() ? "" : " | ") + std::string(text);
  };
  add(simulator_mem_device, "mem_device");
  add(simulator_mem_threadgroup, "mem_threadgroup");
  add(simulator_mem_texture, "mem_texture");
  return name.empty() ? "mem_none" : name;
}

std::string wait_name(const Wait& wait) {
  if (wait.kind == Wait::collective) return wait.operation;
  return std::string(wait.operation) + "(" + scope_name(wait.scope) + ")";
}

}  // namespace

std::string Worker::name_thread(uint32_t index) const {
  return "thread " + text(position(index)) + " of threadgroup " + text(group_position_);
}

void Worker::fail_in_kernel(const std::string& what) {
  fail("kernel '" + std::string(job_->kernel.name) + "': " + what + "; " + name_thread(current_));
}

std::string Worker::diverged(const Wait& here, const Wait& there, uint32_t other) const {
  const bool is_same_name = wait_name(here) == wait_name(there);
  const char* group = here.kind == Wait::threadgroup_barrier ? "threadgroup" : "simdgroup";
  return "kernel '" + std::string(job_->kernel.name) + "': divergent " + here.operation + ": thread " +
         text(position(current_)) + " is at " + wait_name(here) + " while thread " + text(position(other)) +
         " of its " + group + " waits at " + (is_same_name ? "another " : "") + wait_name(there) + "; " +
         name_thread(current_);
}

const Wait* Worker::waits_at(uint32_t lane) const {
  if (lanes_[lane].returned) return nullptr;
  const Simdgroup& simdgroup = simdgroups_[lane / 32];
  return simdgroup.arrived >> lane % 32 & 1 ? &simdgroup.wait : &barrier_;
}

// Describes why no thread can continue: where threads wait, and which threads have returned. If a rendezvous of one
// simdgroup is incomplete, it reports that one, and not the barrier that other threads have reached.
std::string Worker::stuck() const {
  const uint32_t simdgroup_count = (lane_count_ + 31) / 32;
  uint32_t simdgroup = 0;
  while (simdgroup < simdgroup_count && simdgroups_[simdgroup].arrived == 0) ++simdgroup;
  const bool in_simdgroup = simdgroup < simdgroup_count;
  const Wait& wanted = in_simdgroup ? simdgroups_[simdgroup].wait : barrier_;
  const uint32_t begin = in_simdgroup ? simdgroup * 32 : 0;
  const uint32_t end = in_simdgroup ? std::min(begin + 32, lane_count_) : lane_count_;

  struct Place {
    const Wait* wait;
    uint32_t first, count;
  };
  std::vector<Place> places;
  for (uint32_t i = begin; i < end; ++i) {
    const Wait* wait = waits_at(i);
    const auto place =
        std::find_if(places.begin(), places.end(), [&](const Place& known) { return known.wait == wait; });
    if (place == places.end()) {
      places.push_back({wait, i, 1});
    } else {
      ++place->count;
    }
  }
  std::string list;
  for (const Place& place : places) {
    list += (list.empty() ? "" : ", ") + std::to_string(place.count) + (place.count == 1 ? " thread " : " threads ") +
            (place.wait ? "at " + wait_name(*place.wait) : "returned") + " (thread " + text(position(place.first)) +
            (place.count == 1 ? ")" : " first)");
  }
  return "kernel '" + std::string(job_->kernel.name) + "': divergent " + wanted.operation +
         ": not all threads of the " + (in_simdgroup ? "simdgroup" : "threadgroup") + " reach it: " + list +
         "; threadgroup " + text(group_position_);
}

}  // namespace simulator
