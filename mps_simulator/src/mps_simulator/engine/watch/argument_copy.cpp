#include "argument_copy.h"

#include <algorithm>
#include <cstring>

#include "mps_simulator/engine/pages.h"

namespace simulator {

ArgumentCopy::ArgumentCopy(std::shared_ptr<const Memory> memory, uintptr_t start, size_t length)
    : memory_(std::move(memory)),
      first_(start - memory_->start),
      length_(length),
      pages_(new_pages(length_ + 2 * kChunk)),
      data_(pages_ + start % kChunk),  // keeps the offset within a cache line
      is_here_(new bool[memory_->length / kChunk + 1]()),
      read_(memory_->length),
      written_(memory_->length) {}

ArgumentCopy::~ArgumentCopy() { free_pages(pages_, length_ + 2 * kChunk); }

ArgumentCopy::Range ArgumentCopy::range_of(size_t chunk) const {
  return {std::max(chunk * kChunk, first_), std::min((chunk + 1) * kChunk, first_ + length_)};
}

void ArgumentCopy::fetch(size_t chunk) {
  const std::lock_guard lock(mutex_);
  if (is_here_[chunk]) return;
  const auto [first, end] = range_of(chunk);
  std::memcpy(data_ + (first - first_), reinterpret_cast<const std::byte*>(memory_->start) + first, end - first);
  chunks_.push_back(chunk);
  __atomic_store_n(&is_here_[chunk], true, __ATOMIC_RELEASE);
}

void ArgumentCopy::write_back() const {
  auto* memory = reinterpret_cast<std::byte*>(memory_->start);
  for (const size_t chunk : chunks_) {
    const auto [first, end] = range_of(chunk);
    for (size_t offset = first; offset < end; ++offset) {
      if (written_.test(offset, 1)) memory[offset] = data_[offset - first_];
    }
  }
}

std::optional<ArgumentCopy::Clash> ArgumentCopy::clash_with(const ArgumentCopy& other) const {
  for (const size_t chunk : chunks_) {
    if (memory_ != other.memory_ || !other.is_here_[chunk]) continue;
    const auto [first, end] = range_of(chunk);
    for (size_t offset = first; offset < end; ++offset) {
      const bool is_written_here = written_.test(offset, 1), is_written_there = other.written_.test(offset, 1);
      const bool is_used_here = is_written_here || read_.test(offset, 1);
      const bool is_used_there = is_written_there || other.read_.test(offset, 1);
      if (is_used_here && is_used_there && (is_written_here || is_written_there)) {
        return Clash{offset, is_written_here, is_written_there};
      }
    }
  }
  return std::nullopt;
}

}  // namespace simulator
