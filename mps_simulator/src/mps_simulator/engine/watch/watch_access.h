// Checks one access. Only tsan_hooks.cpp includes this file, so that everything in it is inlined.
#pragma once
#include "watch.h"

namespace simulator {

template <Action action>
[[gnu::always_inline]] inline void Watch::access(uintptr_t address, size_t size, bool is_natural, const void* site) {
  if (address - private_start_ < private_length_) return;
  if (is_natural && address % size != 0) [[unlikely]]
    fail_misaligned({action, address, size});
  Segment*& last = last_at_[(reinterpret_cast<uintptr_t>(site) >> 2) % kSites];
  size_t offset = address - last->start;
  if (offset >= last->length || last->length - offset < size) [[unlikely]] {
    Segment* segment = find(address, size);
    if (!segment) return access_elsewhere<action>(address, size, site);
    last = segment;
  }
  access_segment<action>(*last, address, size, site);
}

template <Action action>
[[gnu::always_inline]] inline void Watch::access_segment(Segment& segment, uintptr_t address, size_t size,
                                                         const void* site) {
  if constexpr (reads(action)) {
    bytes_[segment.kind][0] += size;
    if (segment.written && !segment.written->test(address - segment.written_start, size)) [[unlikely]] {
      fail_unwritten({action, address, size});
    }
  }
  if constexpr (writes(action)) {
    if (!segment.is_writable) [[unlikely]]
      fail_not_writable({action, address, size});
    bytes_[segment.kind][1] += size;
  }
  if (segment.may_race) {
    if (segment.kind == Segment::threadgroup) {
      order<action>(segment, address, size);
    } else {
      order_shared<action>(segment, address, size);
      if (segment.copy) [[unlikely]]
        segment.copy->use(address, size, reads(action), writes(action));
    }
  }
  if constexpr (writes(action)) {
    if (segment.kind == Segment::threadgroup) {
      segment.written->set_alone(address - segment.written_start, size);
    } else {
      segment.written->set(address - segment.written_start, size);
    }
  }
  if (is_detailed_) [[unlikely]]
    accesses_.add(thread_, segment, {site, address, size, reads(action), writes(action)});
}

// Handles an access that is not inside one segment. If it crosses into another segment, it is checked byte by byte.
// Otherwise it is out of bounds.
template <Action action>
void Watch::access_elsewhere(uintptr_t address, size_t size, const void* site) {
  for (size_t i = 0; i < size; ++i) {
    if (!find(address + i, 1)) fail_outside({action, address, size});
  }
  for (size_t i = 0; i < size; ++i) access_segment<action>(*find(address + i, 1), address + i, 1, site);
}

template <Action action>
void Watch::access_range(uintptr_t address, size_t size, const void* site) {
  while (size > 0) {
    const size_t here = size < 16 ? size : 16 - address % 16;
    access<action>(address, here, false, site);
    address += here;
    size -= here;
  }
}

// ---- order within a threadgroup --------------------------------------------------------------------------------

// Checks an access against the cell of its unit, and records it there. Returns false for a race.
template <Action action>
[[gnu::always_inline]] inline bool Watch::step(uint64_t& word, Space space) {
  Cell cell = Cell::unpack(word);
  const uint32_t mine = thread_ / 32;
  const uint32_t barrier = ordered_[space], simdgroup_barrier = simdgroup_ordered_[mine][space];
  const bool is_read_open = cell.read_tick > barrier, is_write_open = cell.write_tick > barrier;
  const bool is_reader_ours = cell.reader / 32 == mine, is_writer_ours = cell.writer / 32 == mine;

  if (is_write_open && cell.writer != thread_ && !(is_writer_ours && cell.write_tick <= simdgroup_barrier) &&
      !(is_atomic(action) && cell.written_atomically)) {
    return false;
  }
  if constexpr (writes(action) || is_atomic(action)) {
    const bool is_only_reader = cell.readers == Cell::one && cell.reader == thread_;
    const bool is_ordered =
        cell.readers != Cell::many_simdgroups && is_reader_ours && cell.read_tick <= simdgroup_barrier;
    if (is_read_open && !is_only_reader && !is_ordered) return false;
    cell = {Cell::one, is_atomic(action), 0, thread_, 0, tick_};
  } else {
    if (is_read_open) {
      if (cell.readers == Cell::many_simdgroups || !is_reader_ours) {
        cell.readers = Cell::many_simdgroups;
      } else if (cell.read_tick <= simdgroup_barrier) {
        cell.readers = Cell::one;
      } else if (cell.reader != thread_) {
        cell.readers = Cell::several;
      }
      if (cell.reader != thread_ && !is_write_open) cell.writer = cell.reader;
    } else {
      cell.readers = Cell::one;
    }
    cell.reader = thread_;
    cell.read_tick = tick_;
  }
  word = cell.pack();
  return true;
}

// Handles a read that leaves the cell unchanged. Most reads of a shared tile do.
inline bool Watch::is_noted(uint64_t word, Space space) const {
  const Cell cell = Cell::unpack(word);
  if (cell.write_tick > ordered_[space]) return false;
  if (cell.readers == Cell::many_simdgroups) return cell.read_tick > ordered_[space];
  if (cell.readers == Cell::several) return cell.read_tick == tick_ && cell.reader / 32 == thread_ / 32;
  return cell.readers == Cell::one && cell.read_tick == tick_ && cell.reader == thread_;
}

// Checks the cells of a vector. They are mostly equal; one check is then enough for all of them.
template <Action action>
[[gnu::always_inline]] inline void Watch::order(const Segment& segment, uintptr_t address, size_t size) {
  if (!keeps_order_) [[unlikely]]
    return;
  const size_t unit = size_t{1} << segment.unit_log2;
  if ((address | size) & (unit - 1)) [[unlikely]]
    return order_bytes<action>(segment, address, size);
  uint64_t* cell = segment.cells + ((address - segment.shadow_start) >> segment.unit_log2);
  uint64_t* const end = cell + (size >> segment.unit_log2);
  while (cell != end) {
    const uint64_t before = *cell;
    if (action == Action::read && is_noted(before, threadgroup_space)) {
      do ++cell;
      while (cell != end && *cell == before);
      continue;
    }
    uint64_t after = before;
    if ((before & 3) == Cell::split) [[unlikely]] {
      if (Cell::unpack(before).read_tick > ordered_[threadgroup_space])
        return order_bytes<action>(segment, address, size);
      after = 0;
    }
    if (!step<action>(after, threadgroup_space)) [[unlikely]]
      fail_race({action, address, size}, segment, before);
    do *cell++ = after;
    while (cell != end && *cell == before);
  }
}

// Handles units that are used in parts. A split lasts until the next threadgroup barrier.
template <Action action>
void Watch::order_bytes(const Segment& segment, uintptr_t address, size_t size) {
  const size_t unit = size_t{1} << segment.unit_log2;
  for (size_t i = 0; i < size; ++i) {
    const size_t offset = address + i - segment.shadow_start;
    uint64_t* bytes = segment.byte_cells + offset / unit * unit;
    if (i == 0 || offset % unit == 0) split(segment.cells[offset / unit], bytes, unit);
    if (!step<action>(segment.byte_cells[offset], threadgroup_space)) {
      fail_race({action, address + i, 1}, segment, segment.byte_cells[offset]);
    }
  }
}

// ---- order between threadgroups --------------------------------------------------------------------------------

template <Action action>
[[gnu::always_inline]] inline Watch::Step Watch::step_shared(SharedCell& shared) {
  constexpr uint64_t kind = is_atomic(action) ? SharedCell::atomic
                            : writes(action)  ? SharedCell::write
                                              : SharedCell::read;
  constexpr uint64_t rivals = kind == SharedCell::read    ? SharedCell::write | SharedCell::atomic
                              : kind == SharedCell::write ? SharedCell::read | SharedCell::write | SharedCell::atomic
                                                          : SharedCell::read | SharedCell::write;
  uint64_t owner = shared.owner.load(std::memory_order_relaxed);
  for (;;) {
    const uint32_t run = SharedCell::run(owner);
    uint64_t cell = 0;
    if (run < first_run_) {
      if (!replace(shared.owner, owner, SharedCell::pack(run_, thread_, kind))) continue;
    } else if (owner & SharedCell::split) {
      return Step::split;
    } else if (run == run_ && !(owner & SharedCell::many)) {
      if (!(owner & kind) && !replace(shared.owner, owner, owner | kind)) continue;
      cell = shared.cell.load(std::memory_order_relaxed);
      if (SharedCell::is_second(cell)) {  // another threadgroup has changed the cell meanwhile
        owner = shared.owner.load(std::memory_order_relaxed);
        continue;
      }
    } else {
      if (owner & rivals) return Step::conflict;
      if ((owner & SharedCell::many) && (owner & kind)) return Step::done;
      const bool is_second = !(owner & SharedCell::many);
      if (!replace(shared.owner, owner, owner | SharedCell::many | kind)) continue;
      const uint64_t second = SharedCell::pack_second(run_ - first_run_, thread_, kind);
      if (is_second) shared.cell.store(second, std::memory_order_relaxed);
      return Step::done;
    }
    if (!step<action>(cell, device_space)) return Step::conflict;
    shared.cell.store(cell, std::memory_order_relaxed);
    return Step::done;
  }
}

template <Action action>
[[gnu::always_inline]] inline void Watch::order_shared(const Segment& segment, uintptr_t address, size_t size) {
  if (!keeps_order_) [[unlikely]]
    return;
  const size_t unit = size_t{1} << segment.unit_log2;
  if ((address | size) & (unit - 1)) [[unlikely]]
    return order_shared_bytes<action>(segment, address, size);
  SharedCell* cell = segment.shared_cells + ((address - segment.shadow_start) >> segment.unit_log2);
  for (SharedCell* const end = cell + (size >> segment.unit_log2); cell != end; ++cell) {
    const Step outcome = step_shared<action>(*cell);
    if (outcome == Step::done) [[likely]]
      continue;
    if (outcome == Step::split) return order_shared_bytes<action>(segment, address, size);
    fail_shared_race({action, address, size}, segment, *cell);
  }
}

// Handles units that are used in parts. A split lasts until the end of the dispatch.
template <Action action>
void Watch::order_shared_bytes(const Segment& segment, uintptr_t address, size_t size) {
  const size_t unit = size_t{1} << segment.unit_log2;
  for (size_t i = 0; i < size; ++i) {
    const size_t offset = address + i - segment.shadow_start;
    SharedCell* bytes = segment.shared_byte_cells + offset / unit * unit;
    if (i == 0 || offset % unit == 0) split_shared(segment.shared_cells[offset / unit], bytes, unit);
    SharedCell& cell = segment.shared_byte_cells[offset];
    if (step_shared<action>(cell) == Step::conflict) fail_shared_race({action, address + i, 1}, segment, cell);
  }
}

}  // namespace simulator
