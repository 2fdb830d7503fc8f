#include "shadow.h"

#include <sys/mman.h>

#include <new>

namespace simulator {
namespace {

// A dispatch that needs more than this frees its cells at once, and does not keep them for the next dispatch.
constexpr size_t kKeptLength = size_t{1} << 31;

}  // namespace

ShadowArena::~ShadowArena() { release(); }

void ShadowArena::release() {
  if (mapping_) munmap(mapping_, length_);
  mapping_ = nullptr;
  length_ = 0;
}

uint32_t ShadowArena::claim_runs(uint64_t count) {
  if (next_run_ + count > UINT32_MAX) {
    release();
    next_run_ = 1;
  }
  const auto first = uint32_t(next_run_);
  next_run_ += count;
  return first;
}

SharedCell* ShadowArena::claim_cells(size_t count) {
  const size_t wanted = count * sizeof(SharedCell);
  if (wanted > length_ || length_ > kKeptLength) {
    release();
    const size_t length = (wanted + 0xFFFFF) / 0x100000 * 0x100000;
    void* mapping = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    mapping_ = mapping;
    length_ = length;
  }
  return static_cast<SharedCell*>(mapping_);
}

ShadowArena& shadow_arena() {
  static ShadowArena arena;
  return arena;
}

}  // namespace simulator
