#include "ops/layers/copy_from_host.h"

#include <c10/util/SmallVector.h>

#include <algorithm>

#include "metal/implement.h"
#include "shaders/layers/copy_from_host.h"

namespace torch_gdn {

namespace {

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

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<CopyFromHost, &run>(m); }

}  // namespace torch_gdn
