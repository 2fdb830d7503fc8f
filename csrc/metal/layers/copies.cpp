// Copies that run in order with the other launches of a stream.
#include "ops/layers/copies.h"

#include <c10/util/SmallVector.h>

#include <algorithm>

#include "metal/implement.h"
#include "shaders/layers/parameters.h"

namespace torch_gdn {

namespace {

constexpr int64_t kFewestParts = 4;  // threadgroups per range, needed for a large range among many
constexpr int64_t kTileBytes = 16 * kCopyThreads * kCopyUnits;

// If the sizes are on the device, the host knows only the size of the pool.
int64_t largest_size(const BatchCopy<int64_t>& op) {
  if (!op.ranges.are_on_cpu()) return op.pool.size(0);
  int64_t largest = 0;
  for (const auto& range : op.ranges.read()) largest = std::max(largest, range.size);
  return largest;
}

void run(const BatchCopy<int64_t>& op) {
  const auto device = op.pool.device();
  const Tensor source = index_array(device, op.ranges.source_offsets),
               destination = index_array(device, op.ranges.destination_offsets),
               sizes = index_array(device, op.ranges.sizes);
  const int64_t n = sizes.size(0);
  TORCH_CHECK_VALUE(n <= INT32_MAX, "batch_copy_: sizes: expected fewer than 2^31 ranges, got ", n);
  if (n == 0) return;
  const int64_t wanted = std::max(kFewestParts, ceil_div(4 * busy_threadgroups(), n));
  const int64_t parts = std::min(wanted, std::max<int64_t>(1, ceil_div(largest_size(op), kTileBytes)));
  const BatchCopyParameters parameters{op.pool.size(0),
                                       source.stride(0),
                                       destination.stride(0),
                                       sizes.stride(0),
                                       int32_t(source.element_size()),
                                       int32_t(destination.element_size()),
                                       int32_t(sizes.element_size()),
                                       int32_t(op.pool.storage_offset() % 16),
                                       op_name()};
  launcher().run({{"layers/batch_copy",
                   {kCopyThreads},
                   {op.pool, source, destination, sizes, Binding::error_log(), parameters},
                   {parts, n, 1},
                   kCopyThreads}});
}

// Above this number of launches, PyTorch's copy moves the bytes. It waits for the GPU, but each launch moves only 4,096
// bytes.
constexpr int64_t kMostLaunches = 8;
constexpr int64_t kMostOfTensor = int64_t(1) << 30;  // the kernel counts bytes in 32 bits

Launch launch_of(const Tensor& dst, const Tensor& bytes, int64_t first) {
  const int64_t count = bytes.numel();
  const CopyFromHostParameters parameters{first, int32_t(count)};
  return {"layers/copy_from_host",
          {kHostCopyThreads},
          {dst, bytes, parameters},
          {ceil_div(count, kHostCopyThreads), 1, 1},
          kHostCopyThreads};
}

void run(const CopyFromHost<int64_t>& op) {
  const int64_t size = op.src.nbytes();
  const int64_t each = op.src.is_cpu() ? kMostOfSetBytes : kMostOfTensor;
  if (size == 0) return;
  if (size > kMostLaunches * each) return op.copy();
  // A tensor with one element is contiguous whatever its stride is, but view() needs a stride of 1.
  const Tensor bytes = op.src.contiguous().as_strided({op.src.numel()}, {1}).view(at::kByte);
  c10::SmallVector<Launch, kMostLaunches> launches;
  for (int64_t first = 0; first < size; first += each) {
    launches.push_back(launch_of(op.dst, bytes.narrow(0, first, std::min(each, size - first)), first));
  }
  launcher().run(launches);
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<BatchCopy, &run>(m);
  metal::implement<CopyFromHost, &run>(m);
}

}  // namespace torch_gdn
