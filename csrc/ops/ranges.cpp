#include "ops/ranges.h"

#include <algorithm>

#include "ops/indices.h"

namespace torch_gdn {

namespace {

// The bytes [first, last) that range n writes.
struct Written {
  int64_t first, last, n;
};

void check_inside(const char* op, const char* argument, int64_t offset, int64_t size, int64_t n, int64_t bytes) {
  TORCH_CHECK_VALUE(offset >= 0 && offset <= bytes && size <= bytes - offset, op, ": ", argument,
                    ": expected ranges within the pool's ", bytes, " bytes, got ", size, " bytes at offset ", offset,
                    " for range ", n);
}

void refuse_overlap(const char* op, int64_t n, int64_t other) {
  TORCH_CHECK_VALUE(false, op, ": destination_offsets: expected no range to write what another one reads or writes, ",
                    "got range ", n, ", which overlaps range ", other);
}

std::vector<Written> written_by(const char* op, const std::vector<ByteRange>& ranges) {
  std::vector<Written> written;
  for (size_t n = 0; n < ranges.size(); ++n) {
    const auto& [source, destination, size] = ranges[n];
    if (size > 0) written.push_back({destination, destination + size, int64_t(n)});
  }
  std::sort(written.begin(), written.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (size_t i = 1; i < written.size(); ++i) {
    if (written[i].first < written[i - 1].last) refuse_overlap(op, written[i].n, written[i - 1].n);
  }
  return written;
}

}  // namespace

std::vector<ByteRange> ByteRanges::read() const {
  const Indices from(source_offsets), to(destination_offsets), bytes(sizes);
  std::vector<ByteRange> ranges(from.size());
  for (int64_t n = 0; n < from.size(); ++n) ranges[n] = {from[n], to[n], bytes[n]};
  return ranges;
}

void check_ranges(const char* op, const ByteRanges& byte_ranges, int64_t bytes) {
  const auto ranges = byte_ranges.read();
  for (size_t n = 0; n < ranges.size(); ++n) {
    const auto& [source, destination, size] = ranges[n];
    TORCH_CHECK_VALUE(size >= 0, op, ": sizes: expected non-negative numbers of bytes, got ", size, " at ", n);
    check_inside(op, "source_offsets", source, size, n, bytes);
    check_inside(op, "destination_offsets", destination, size, n, bytes);
  }
  const auto written = written_by(op, ranges);
  for (size_t n = 0; n < ranges.size(); ++n) {
    const int64_t first = ranges[n].source, last = first + ranges[n].size;
    auto other = std::upper_bound(written.begin(), written.end(), first,
                                  [](int64_t byte, const Written& each) { return byte < each.last; });
    for (; other != written.end() && other->first < last; ++other) {
      if (other->n != int64_t(n)) refuse_overlap(op, other->n, int64_t(n));
    }
  }
}

}  // namespace torch_gdn
