#include "simdgroup_access.h"

#include <algorithm>
#include <string_view>

namespace simulator {
namespace {

constexpr size_t kLine = 128;      // bytes in a cache line
constexpr size_t kBanks = 32;      // banks of threadgroup memory
constexpr size_t kWord = 4;        // bytes in a bank's word
constexpr uintptr_t kWritten = 1;  // distinguishes a site's writes from its reads; sites are further apart than this

size_t quotient_rounded_up(size_t value, size_t divisor) { return (value + divisor - 1) / divisor; }

}  // namespace

void SimdgroupAccesses::add(uint32_t thread, const Segment& segment, const LaneAccess& access) {
  if (segment.kind != Segment::device && segment.kind != Segment::threadgroup) return;
  Simdgroup& simdgroup = simdgroups_[thread / 32];
  if (simdgroup.turns.run(thread % 32)) simdgroup.matrix_parts = 0;
  const bool is_matrix = simdgroup.matrix && simdgroup.matrix_parts < 2;
  const void* place = is_matrix ? simdgroup.matrix : access.site;
  Site& site = simdgroup.sites[reinterpret_cast<uintptr_t>(place) * 2 + (access.writes ? kWritten : 0)];
  if (site.interval != simdgroup.turns.interval) {
    site.interval = simdgroup.turns.interval;
    site.accesses.clear();
  }
  if (site.turn != simdgroup.turns.turn) {
    site.turn = simdgroup.turns.turn;
    site.count = 0;
  }
  if (is_matrix && simdgroup.matrix_parts++ > 0) site.count = 0;
  Access& whole = access_of(simdgroup, site, site.count++, segment, access);
  whole.parts[whole.part_count++] = {access.address, uint8_t(access.size)};
}

// If lanes use different buffers or arrays through one pointer, each of these counts as one access.
SimdgroupAccesses::Access& SimdgroupAccesses::access_of(Simdgroup& simdgroup, Site& site, uint32_t number,
                                                        const Segment& segment, const LaneAccess& access) {
  if (number < site.accesses.size()) {
    Access& known = simdgroup.accesses[site.accesses[number]];
    const bool is_same = known.segment->kind == segment.kind && known.segment->written_start == segment.written_start;
    if (is_same && known.part_count < kMaxParts) return known;
    site.accesses[number] = uint32_t(simdgroup.accesses.size());
  } else {
    site.accesses.push_back(uint32_t(simdgroup.accesses.size()));
  }
  Access& added = simdgroup.accesses.emplace_back();
  added.segment = &segment;
  added.reads = access.reads;
  added.writes = access.writes;
  added.part_count = 0;
  return added;
}

void SimdgroupAccesses::meet(uint32_t index, const char* operation, const void* site) {
  settle(simdgroups_[index]);
  const std::string_view name = operation;
  if (name == "simdgroup_load" || name == "simdgroup_store") simdgroups_[index].matrix = site;
}

void SimdgroupAccesses::settle_all() {
  for (Simdgroup& simdgroup : simdgroups_) {
    settle(simdgroup);
    if (simdgroup.has_loaded) ++figures_.load_rounds;
    simdgroup.has_loaded = false;
  }
}

void SimdgroupAccesses::settle(Simdgroup& simdgroup) {
  for (Access& access : simdgroup.accesses) {
    const auto begin = access.parts.begin();
    std::sort(begin, begin + access.part_count, [](const Part& a, const Part& b) { return a.address < b.address; });
    if (access.segment->kind == Segment::device) {
      count_device(access);
      if (access.reads) simdgroup.has_loaded = true;
    } else {
      count_threadgroup(access);
    }
  }
  simdgroup.accesses.clear();
  simdgroup.matrix = nullptr;
  simdgroup.turns.end_interval();
}

void SimdgroupAccesses::count_device(const Access& access) {
  const Segment& segment = *access.segment;
  size_t bytes = 0, lines = 0;
  uintptr_t next = 0, next_line = 0;  // the end of what is already counted
  for (uint32_t i = 0; i < access.part_count; ++i) {
    const uintptr_t end = access.parts[i].address + access.parts[i].size;
    const uintptr_t begin = std::max<uintptr_t>(access.parts[i].address, next);
    if (begin >= end) continue;
    bytes += end - begin;
    next = end;
    const uintptr_t first_line = std::max(begin / kLine, next_line), end_line = (end - 1) / kLine + 1;
    lines += end_line - std::min(first_line, end_line);
    next_line = end_line;
    const size_t offset = begin - segment.written_start;
    if (access.reads) segment.touched->read.set_range_once(offset, end - begin);
    if (access.writes) segment.touched->written.set_range_once(offset, end - begin);
  }
  ++figures_.device_accesses;
  if (access.reads) figures_.device_bytes_issued_read += bytes;
  if (access.writes) figures_.device_bytes_issued_written += bytes;
  figures_.cache_lines += lines;
  figures_.least_cache_lines += quotient_rounded_up(bytes, kLine);
}

void SimdgroupAccesses::count_threadgroup(const Access& access) {
  std::array<uint32_t, kBanks> cycles{};
  size_t words = 0, next = 0;
  for (uint32_t i = 0; i < access.part_count; ++i) {
    const size_t offset = access.parts[i].address - access.segment->start;
    const size_t end = quotient_rounded_up(offset + access.parts[i].size, kWord);
    for (size_t word = std::max(offset / kWord, next); word < end; ++word) {
      ++cycles[word % kBanks];
      ++words;
    }
    next = std::max(next, end);
  }
  ++figures_.threadgroup_accesses;
  figures_.bank_cycles += *std::max_element(cycles.begin(), cycles.end());
  figures_.least_bank_cycles += quotient_rounded_up(words, kBanks);
}

}  // namespace simulator
