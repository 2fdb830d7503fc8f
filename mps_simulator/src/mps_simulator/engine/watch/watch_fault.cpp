#include <algorithm>
#include <string>

#include "mps_simulator/engine/run/job.h"
#include "mps_simulator/engine/run/worker.h"
#include "watch.h"

namespace simulator {

// Finds the argument or array that contains an address, or the nearest one.
struct Watch::Place {
  std::string name;
  int64_t offset = 0;
  size_t length = 0, element = 1;
  const Window* window = nullptr;
  const ThreadgroupArray* array = nullptr;

  int64_t index() const {
    const auto size = int64_t(element);
    return offset >= 0 ? offset / size : -((-offset + size - 1) / size);
  }
  std::string text() const {
    return name + ", element " + std::to_string(index()) + " (byte offset " + std::to_string(offset) + ")";
  }
};

namespace {

std::string bytes(size_t count) { return std::to_string(count) + (count == 1 ? " byte" : " bytes"); }

std::string argument_name(const simulator_parameter& parameter) {
  const char* space = parameter.kind == simulator_threadgroup_memory ? "threadgroup " : "buffer ";
  return "argument '" + std::string(parameter.name) + "' (" + space + std::to_string(parameter.index) + ")";
}

const char* verb(Action action) { return is_atomic(action) ? "atomic access" : writes(action) ? "write" : "read"; }
const char* does(Action action) {
  return is_atomic(action) ? "uses as an atomic" : writes(action) ? "writes" : "reads";
}
const char* did(Action action) { return is_atomic(action) ? "used as an atomic" : writes(action) ? "wrote" : "read"; }

size_t distance(uintptr_t address, uintptr_t start, size_t length) {
  return address < start ? start - address : address - start < length ? 0 : address - start - length + 1;
}

}  // namespace

Watch::Place Watch::place_of(const Access& access) const {
  Place best;
  best.name = "memory of no argument";
  size_t nearest = SIZE_MAX;
  // If several arguments contain the address, this prefers the one that begins last, and among equals a writable one.
  const auto precedes = [&](const Window& window, size_t far) {
    if (far != nearest) return far < nearest;
    if (far > 0 || window.start != best.window->start) return far == 0 && window.start > best.window->start;
    return !window.parameter->is_const;
  };
  for (const Window& window : job_->layout->windows) {
    const size_t far = distance(access.address, window.start, window.length);
    if (!precedes(window, far)) continue;
    nearest = far;
    const size_t element = std::max<size_t>(window.parameter->value_size, 1);
    const auto offset = int64_t(access.address - window.start);
    best = {argument_name(*window.parameter), offset, window.length, element, &window, nullptr};
  }
  for (size_t i = 0; i < array_count_; ++i) {
    const ThreadgroupArray& array = arrays_[i]->array;
    const auto start = reinterpret_cast<uintptr_t>(array.data);
    const size_t far = distance(access.address, start, array.size);
    if (far >= nearest) continue;
    nearest = far;
    const std::string name = array.index < 0 ? "threadgroup array '" + std::string(array.name) + "'"
                                             : "argument '" + std::string(array.name) + "' (threadgroup " +
                                                   std::to_string(array.index) + ")";
    best = {name, int64_t(access.address - start), array.size, array.element, nullptr, &array};
  }
  return best;
}

std::string Watch::here() const { return worker_.name_thread(thread_); }

void Watch::fail(const std::string& what) { worker_.fail("kernel '" + std::string(job_->kernel.name) + "': " + what); }

void Watch::fail_outside(const Access& access) {
  constexpr uintptr_t kNullPage = 1 << 20;
  if (access.address < kNullPage && !job_->layout->absent.empty()) {
    std::string names;
    for (const simulator_parameter* parameter : job_->layout->absent)
      names += (names.empty() ? "" : ", ") + argument_name(*parameter);
    fail(std::string(verb(access.action)) + " through a null pointer: nobody set " + names + "; " + here());
  }
  const Place place = place_of(access);
  const size_t count = place.length / place.element;
  fail("out of bounds " + std::string(verb(access.action)) + " of " + bytes(access.size) + " at " + place.text() +
       "; it has " + std::to_string(count) + (count == 1 ? " element" : " elements") + " (" + bytes(place.length) +
       "); " + here());
}

void Watch::fail_misaligned(const Access& access) {
  fail("misaligned " + std::string(verb(access.action)) + " of " + bytes(access.size) + " at " +
       place_of(access).text() + ": its address must be a multiple of " + std::to_string(access.size) + "; " + here());
}

void Watch::fail_not_writable(const Access& access) {
  const Place place = place_of(access);
  const bool is_argument = place.window && distance(access.address, place.window->start, place.window->length) == 0;
  if (!is_argument) fail("write to a constant of the program; " + here());
  const simulator_parameter& parameter = *place.window->parameter;
  const char* why = parameter.is_constant_space ? "in constant space" : "const";
  fail("write of " + bytes(access.size) + " to " + place.text() + ", which is " + why + "; " + here());
}

void Watch::fail_unwritten(const Access& access) {
  fail(std::string(verb(access.action)) + " of " + bytes(access.size) + " at " + place_of(access).text() +
       ", which nothing has written; " + here());
}

Rival Watch::rival_of(const Access& access, uint64_t word, Space space) const {
  const Cell cell = Cell::unpack(word);
  const bool is_write_open = cell.write_tick > ordered_[space];
  const bool is_writer_ordered =
      cell.writer / 32 == thread_ / 32 && cell.write_tick <= simdgroup_ordered_[thread_ / 32][space];
  Rival rival;
  if (is_write_open && cell.writer != thread_ && !is_writer_ordered &&
      !(is_atomic(access.action) && cell.written_atomically)) {
    rival.action = cell.written_atomically ? Action::atomic_update : Action::write;
    rival.thread = cell.writer;
  } else {
    rival.thread = cell.reader != thread_ ? cell.reader : cell.writer;
    rival.is_known = cell.reader != thread_ || !is_write_open;
  }
  return rival;
}

void Watch::fail_race(const Access& access, const Segment& segment, uint64_t word) {
  const bool is_device = segment.kind == Segment::device;
  const Rival rival = rival_of(access, word, is_device ? device_space : threadgroup_space);
  const std::string other = rival.is_known ? "thread " + text(worker_.position(rival.thread)) : "another thread";
  const bool is_same_simdgroup = rival.is_known && rival.thread / 32 == thread_ / 32;
  fail("data race at " + place_of(access).text() + ": " + here() + " " + does(access.action) + " what " + other + " " +
       did(rival.action) + ", with no threadgroup_barrier" + (is_same_simdgroup ? " or simdgroup_barrier" : "") +
       " of " + (is_device ? "mem_device" : "mem_threadgroup") + " between them");
}

void Watch::fail_shared_race(const Access& access, const Segment& segment, const SharedCell& shared) {
  const uint64_t owner = shared.owner.load(std::memory_order_relaxed);
  const bool is_ours = SharedCell::run(owner) == run_;
  const uint64_t cell = shared.cell.load(std::memory_order_relaxed);
  if (is_ours && !(owner & SharedCell::many)) fail_race(access, segment, cell);
  std::string rival = "another threadgroup";
  if (!is_ours || SharedCell::is_second(cell)) {
    const uint64_t group = is_ours ? SharedCell::threadgroup_of_second(cell) : SharedCell::run(owner) - first_run_;
    rival = "thread " + text(worker_.position_in(SharedCell::thread(is_ours ? cell : owner), group)) +
            " of threadgroup " + text(job_->group_position(group));
  }
  const Action action = owner & SharedCell::write    ? Action::write
                        : owner & SharedCell::atomic ? Action::atomic_update
                                                     : Action::read;
  fail("data race at " + place_of(access).text() + ": " + here() + " " + does(access.action) + " what " + rival + " " +
       did(action) + ": nothing orders the threadgroups of a dispatch");
}

}  // namespace simulator
