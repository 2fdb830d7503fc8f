// Checks ranges of bytes that are copied within one buffer.
#pragma once
#include <vector>

#include "ops/check.h"

namespace torch_gdn {

struct ByteRange {
  int64_t source, destination, size;

  bool overlaps_itself() const { return source < destination + size && destination < source + size; }
};

struct ByteRanges {
  Tensor source_offsets, destination_offsets, sizes;  // [n], int32 or int64

  // Returns whether the host can read all three tensors.
  bool are_on_cpu() const { return source_offsets.is_cpu() && destination_offsets.is_cpu() && sizes.is_cpu(); }
  std::vector<ByteRange> read() const;
};

// Raises an error for a range outside the buffer, and for a range that writes bytes that another range reads or writes.
// If the ranges are on the device, the kernel checks only the former.
void check_ranges(const char* op, const ByteRanges& ranges, int64_t bytes);

}  // namespace torch_gdn
