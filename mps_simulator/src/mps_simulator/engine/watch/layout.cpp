#include "layout.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <algorithm>
#include <string>

namespace simulator {
namespace {

uintptr_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

// Returns the constants of a kernel's shared library, which are those that the shader declares at program scope.
Segment module_segment(const void* code) {
  Dl_info info;
  Segment segment;
  segment.kind = Segment::module;
  if (dladdr(code, &info) == 0) return segment;
  const auto* base = static_cast<const std::byte*>(info.dli_fbase);
  const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(base);
  const auto* program = reinterpret_cast<const ElfW(Phdr)*>(base + header->e_phoff);
  for (int i = 0; i < header->e_phnum; ++i) {
    if (program[i].p_type != PT_LOAD) continue;
    segment.length = std::max<size_t>(segment.length, program[i].p_vaddr + program[i].p_memsz);
  }
  segment.start = header->e_type == ET_DYN ? address(base) : 0;
  return segment;
}

struct Group {
  std::shared_ptr<Memory> memory;
  std::vector<Window> windows;

  uintptr_t start() const {  // rounded down to the largest unit
    uintptr_t first = windows.front().start;
    for (const Window& window : windows) first = std::min(first, window.start);
    return first / 4 * 4;
  }
  size_t length() const {
    uintptr_t end = 0;
    for (const Window& window : windows) end = std::max(end, window.start + window.length);
    return end - start();
  }
  uint8_t unit() const {
    uint8_t smallest = 2;
    for (const Window& window : windows) smallest = std::min(smallest, unit_log2(window.parameter->value_alignment));
    return smallest;
  }
  bool is_written() const {
    return std::any_of(windows.begin(), windows.end(),
                       [](const Window& window) { return !window.parameter->is_const; });
  }
  size_t unit_cells() const { return (length() >> unit()) + 1; }
  size_t cells() const { return is_written() ? unit_cells() + length() + 4 : 0; }
};

bool overlap(const Window& a, const Window& b) { return a.start < b.start + b.length && b.start < a.start + a.length; }

// Returns whether data that is written through one of the arguments may be used through another.
bool may_alias(const Group& group, const Window& window) {
  return std::any_of(group.windows.begin(), group.windows.end(), [&](const Window& other) {
    const bool is_written = !window.parameter->is_const || !other.parameter->is_const;
    return other.parameter != window.parameter && is_written && overlap(window, other);
  });
}

Segment segment_of(const Group& group, SharedCell* cells, Touched* touched) {
  Segment segment;
  segment.may_race = group.is_written();
  segment.unit_log2 = group.unit();
  segment.written = &group.memory->written;
  segment.written_start = group.memory->start;
  segment.touched = touched;
  segment.shadow_start = group.start();
  segment.shared_cells = cells;
  segment.shared_byte_cells = cells + group.unit_cells();
  return segment;
}

// Splits the memory at each place where a window begins or ends. Windows that are copies stay separate.
void add_segments(const std::vector<Window>& windows, const Segment& common, std::vector<Segment>& segments) {
  std::vector<uintptr_t> cuts;
  for (const Window& window : windows) cuts.insert(cuts.end(), {window.start, window.start + window.length});
  std::sort(cuts.begin(), cuts.end());
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    Segment segment = common;
    segment.start = cuts[i];
    segment.length = cuts[i + 1] - cuts[i];
    bool is_covered = false;
    for (const Window& window : windows) {
      if (window.start > cuts[i] || cuts[i + 1] > window.start + window.length) continue;
      is_covered = true;
      segment.is_writable |= !window.parameter->is_const;
    }
    if (is_covered && segment.length > 0) segments.push_back(segment);
  }
}

Segment segment_of_copy(const Window& window, Segment segment) {
  segment.start = window.start;
  segment.length = window.length;
  segment.is_writable = !window.parameter->is_const;
  segment.written_start += window.copy->distance();
  segment.shadow_start += window.copy->distance();
  segment.copy = window.copy;
  return segment;
}

// Describes how the kernel uses a byte of the memory.
std::string use_text(const Window& window, size_t offset, bool is_written) {
  const simulator_parameter& parameter = *window.parameter;
  const size_t element = (offset - window.copy->first()) / std::max<size_t>(parameter.value_size, 1);
  return std::string(is_written ? "writes" : "reads") + " element " + std::to_string(element) + " of argument '" +
         parameter.name + "' (buffer " + std::to_string(parameter.index) + ")";
}

}  // namespace

uint8_t unit_log2(size_t alignment) { return alignment >= 4 ? 2 : alignment >= 2 ? 1 : 0; }

Layout::Layout(const Dispatch& dispatch, uint64_t threadgroup_count, bool is_detailed) {
  const simulator_kernel& kernel = *dispatch.function->kernel;
  std::vector<Group> groups;
  for (uint32_t i = 0; i < kernel.parameter_count; ++i) {
    const simulator_parameter& parameter = kernel.parameters[i];
    if (parameter.kind != simulator_buffer) continue;
    const BoundArgument& argument = dispatch.buffers[parameter.index];
    if (argument.kind == BoundArgument::absent) {
      absent.push_back(&parameter);
      continue;
    }
    const size_t length =
        parameter.is_reference ? std::min<size_t>(argument.length, parameter.value_size) : argument.length;
    windows.push_back({&parameter, address(argument.data), length});
    data[parameter.index] = argument.data;
    if (argument.kind == BoundArgument::bytes) {
      Segment segment;
      segment.start = address(argument.data);
      segment.length = length;
      segment.kind = Segment::bytes;
      segments.push_back(segment);
      continue;
    }
    auto memory = find_memory(argument.data);
    if (!memory) {
      throw Fault("kernel '" + std::string(kernel.name) + "': argument '" + parameter.name + "' (buffer " +
                  std::to_string(parameter.index) + ") lies in memory that no buffer of the device holds");
    }
    auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.memory == memory; });
    if (group == groups.end()) group = groups.insert(groups.end(), Group{memory, {}});
    group->windows.push_back(windows.back());
  }
  size_t cells = 0;
  for (const Group& group : groups) cells += group.cells();
  first_run = shadow_arena().claim_runs(threadgroup_count);
  SharedCell* next = cells > 0 ? shadow_arena().claim_cells(cells) : nullptr;
  for (const Group& group : groups) {
    if (is_detailed) touched.push_back(std::make_unique<Touched>(group.memory->length));
    const Segment common = segment_of(group, next, is_detailed ? touched.back().get() : nullptr);
    std::vector<Window> alone;
    for (const Window& window : group.windows) {
      if (may_alias(group, window)) {
        segments.push_back(segment_of_copy(copied(window, group.memory), common));
      } else {
        alone.push_back(window);
      }
    }
    add_segments(alone, common, segments);
    next += group.cells();
    memories.push_back(group.memory);
  }
  segments.push_back(module_segment(reinterpret_cast<const void*>(kernel.run)));
}

const Window& Layout::copied(const Window& window, const std::shared_ptr<Memory>& memory) {
  copies.push_back(std::make_unique<ArgumentCopy>(memory, window.start, window.length));
  const auto own = std::find_if(windows.begin(), windows.end(),
                                [&](const Window& each) { return each.parameter == window.parameter; });
  own->copy = copies.back().get();
  own->start = own->copy->start();
  data[own->parameter->index] = reinterpret_cast<std::byte*>(own->start);
  return *own;
}

std::string Layout::end_copies() const {
  for (const auto& copy : copies) copy->write_back();
  for (const Window& one : windows) {
    for (const Window& other : windows) {
      if (!one.copy || !other.copy || &one >= &other) continue;
      const auto clash = one.copy->clash_with(*other.copy);
      if (!clash) continue;
      return "arguments alias: " + use_text(one, clash->offset, clash->is_written_here) + ", and in the same memory " +
             use_text(other, clash->offset, clash->is_written_there) +
             "; Metal's compiler assumes that memory written through one argument is not used through another";
    }
  }
  return {};
}

void Layout::count_distinct(KernelFigures& figures) const {
  for (const auto& each : touched) {
    figures.device_bytes_distinct_read += each->read.count_range(0, each->length);
    figures.device_bytes_distinct_written += each->written.count_range(0, each->length);
  }
}

}  // namespace simulator
