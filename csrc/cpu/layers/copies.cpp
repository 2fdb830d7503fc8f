// Copies within a pool, and from the host.
#include "ops/layers/copies.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "cpu/define.h"

namespace torch_gdn::cpu {

namespace {

constexpr int64_t kPiece = int64_t(256) << 10;  // bytes per core at a time

// A range that overlaps itself is one piece, however large it is.
std::vector<ByteRange> pieces_of(const std::vector<ByteRange>& ranges) {
  std::vector<ByteRange> pieces;
  for (const auto& range : ranges) {
    const int64_t step = range.overlaps_itself() ? range.size : kPiece;
    for (int64_t first = 0; first < range.size; first += step) {
      pieces.push_back({range.source + first, range.destination + first, std::min(step, range.size - first)});
    }
  }
  return pieces;
}

void run(const BatchCopy<int64_t>& op) {
  const auto pieces = pieces_of(op.ranges.read());
  char* bytes = static_cast<char*>(op.pool.mutable_data_ptr());
  at::parallel_for(0, int64_t(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memmove(bytes + pieces[i].destination, bytes + pieces[i].source, pieces[i].size);
    }
  });
}

void run(const CopyFromHost<int64_t>& op) { op.copy(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  define<BatchCopy, &run>(m);
  define<CopyFromHost, &run>(m);
}

}  // namespace torch_gdn::cpu
