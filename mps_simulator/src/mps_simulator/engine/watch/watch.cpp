#include "watch.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "mps_simulator/engine/count/figures.h"
#include "mps_simulator/engine/run/job.h"
#include "mps_simulator/engine/run/worker.h"

namespace simulator {

constinit thread_local Watch* current_watch __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

// Each array has cells for its units and cells for its bytes.
constexpr size_t kCellsPerArray = 2 * kMaxThreadgroupMemory;
constexpr size_t kCellsLength = ThreadgroupMemory::kMaxArrays * kCellsPerArray * sizeof(uint64_t);

}  // namespace

Watch::Watch(Worker& worker) : worker_(worker) {
  void* mapping =
      mmap(nullptr, kCellsLength, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  cells_ = static_cast<uint64_t*>(mapping);
}

Watch::~Watch() { munmap(cells_, kCellsLength); }

void Watch::begin_dispatch(const Job& job, const FiberPool& fibers) {
  job_ = &job;
  array_count_ = 0;
  if (!job.layout) return;
  private_start_ = fibers.start();
  private_length_ = fibers.length();
  first_run_ = job.layout->first_run;
  is_alone_ = job.workers == 1;
  std::fill_n(&bytes_[0][0], 8, 0);
  is_detailed_ = job.settings.detailed;
  if (is_detailed_) {
    accesses_.begin_dispatch();
    operations_.begin_dispatch(job.dispatch.function->program->blocks());
  }
  segments_.clear();
  segments_.reserve(job.layout->segments.size() + ThreadgroupMemory::kMaxArrays);  // last_at_ points into it
  segments_.insert(segments_.end(), job.layout->segments.begin(), job.layout->segments.end());
  last_at_.fill(&nowhere_);
  current_watch = this;
}

void Watch::end_dispatch(KernelFigures& figures) {
  if (!current_watch) return;
  current_watch = nullptr;
  figures.device_bytes_read = bytes_[Segment::device][0];
  figures.device_bytes_written = bytes_[Segment::device][1];
  figures.threadgroup_bytes_read = bytes_[Segment::threadgroup][0];
  figures.threadgroup_bytes_written = bytes_[Segment::threadgroup][1];
  if (is_detailed_) {
    add_figures(figures, accesses_.figures());
    operations_.add_to(figures);
  }
  is_detailed_ = false;
}

void Watch::add_threadgroup_array(const ThreadgroupArray& array) {
  if (!job_->layout) return;
  if (array_count_ == arrays_.size()) arrays_.push_back(std::make_unique<ArrayRecord>());
  ArrayRecord& record = *arrays_[array_count_];
  record.array = array;
  record.written.clear_range(0, array.size);
  Segment segment;
  segment.start = segment.written_start = segment.shadow_start = reinterpret_cast<uintptr_t>(array.data);
  segment.length = array.size;
  segment.kind = Segment::threadgroup;
  segment.is_writable = segment.may_race = true;
  segment.unit_log2 = unit_log2(array.alignment);
  segment.written = &record.written;
  segment.cells = cells_ + array_count_ * kCellsPerArray;
  segment.byte_cells = segment.cells + kMaxThreadgroupMemory;
  segments_.push_back(segment);
  ++array_count_;
}

void Watch::begin_threadgroup(uint64_t index) {
  if (!job_->layout) return;
  if (tick_ > kTickLimit / 2) {
    madvise(cells_, kCellsLength, MADV_DONTNEED);
    tick_ = 1;
  }
  run_ = first_run_ + uint32_t(index);
  keeps_order_ = true;
  ordered_[device_space] = ordered_[threadgroup_space] = tick_;
  std::fill_n(&simdgroup_ordered_[0][0], sizeof simdgroup_ordered_ / sizeof(uint32_t), 0);
  advance();
  for (size_t i = 0; i < array_count_; ++i) arrays_[i]->written.clear_range(0, arrays_[i]->array.size);
}

void Watch::advance() {
  if (++tick_ == kTickLimit) keeps_order_ = false;
}

void Watch::settle(uint32_t simdgroup, const char* operation, const void* site) {
  accesses_.meet(simdgroup, operation, site);
  operations_.settle(simdgroup);
}

void Watch::settle_all() {
  accesses_.settle_all();
  operations_.settle_all();
}

void Watch::threadgroup_barrier(uint32_t scope) {
  if (is_detailed_) settle_all();
  if (scope & simulator_mem_device) ordered_[device_space] = tick_;
  if (scope & simulator_mem_threadgroup) ordered_[threadgroup_space] = tick_;
  advance();
}

void Watch::simdgroup_barrier(uint32_t simdgroup, uint32_t scope) {
  if (scope & simulator_mem_device) simdgroup_ordered_[simdgroup][device_space] = tick_;
  if (scope & simulator_mem_threadgroup) simdgroup_ordered_[simdgroup][threadgroup_space] = tick_;
  advance();
}

Segment* Watch::find(uintptr_t address, size_t size) {
  for (Segment& segment : segments_) {
    const size_t offset = address - segment.start;
    if (offset < segment.length && segment.length - offset >= size) return &segment;
  }
  return nullptr;
}

// Copies a unit's cell to the cells of its bytes, once per interval.
void Watch::split(uint64_t& word, uint64_t* bytes, size_t count) {
  const Cell cell = Cell::unpack(word);
  const bool is_open = cell.read_tick > ordered_[threadgroup_space] || cell.write_tick > ordered_[threadgroup_space];
  if (cell.readers != Cell::split || !is_open) std::fill_n(bytes, count, is_open ? word : 0);
  word = Cell{Cell::split, false, thread_, thread_, tick_, 0}.pack();
}

void Watch::split_shared(SharedCell& cell, SharedCell* bytes, size_t count) {
  uint64_t owner = cell.owner.load(std::memory_order_acquire);
  for (;;) {
    const bool is_fresh = SharedCell::run(owner) >= first_run_;
    if (is_fresh && (owner & SharedCell::busy)) {
      owner = cell.owner.load(std::memory_order_acquire);
      continue;
    }
    if (is_fresh && (owner & SharedCell::split)) return;
    constexpr uint64_t kMark = SharedCell::split | SharedCell::busy;
    const uint64_t marked = is_fresh ? owner | kMark : SharedCell::pack(run_, thread_, kMark);
    if (!replace(cell.owner, owner, marked)) continue;
    for (size_t i = 0; i < count && is_fresh; ++i) {
      bytes[i].cell.store(cell.cell.load(std::memory_order_relaxed), std::memory_order_relaxed);
      bytes[i].owner.store(owner, std::memory_order_relaxed);
    }
    cell.owner.store(marked & ~uint64_t{SharedCell::busy}, std::memory_order_release);
    return;
  }
}

}  // namespace simulator
