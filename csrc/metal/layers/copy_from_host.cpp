#include "ops/layers/copy_from_host.h"

#include <c10/util/SmallVector.h>

#include <algorithm>

#include "metal/implement.h"
#include "shaders/layers/copy_from_host.h"

namespace torch_gdn {

namespace {

// Above this, PyTorch's copy moves the bytes: it waits for the GPU, but each launch moves only 4,096 bytes.
constexpr int64_t kMostLaunches = 8;

void run(const CopyFromHost<int64_t>& op) {
  const int64_t bytes = op.src.nbytes(), each = kMostOfSetBytes;
  if (bytes == 0) return;
  if (bytes > kMostLaunches * each) {
    op.dst.copy_(op.src);
    return;
  }
  const Tensor source = op.src.contiguous().reshape({-1}).view(at::kByte);
  c10::SmallVector<Launch, kMostLaunches> launches;
  for (int64_t first = 0; first < bytes; first += each) {
    const int64_t count = std::min(each, bytes - first);
    const CopyFromHostParameters parameters{first, int32_t(count)};
    launches.push_back({"copy_from_host",
                        "layers/copy_from_host.metal",
                        {kHostCopyThreads},
                        {op.dst, source.narrow(0, first, count), Binding::values(parameters)},
                        {size_t(ceil_div(count, kHostCopyThreads)), 1, 1},
                        size_t(kHostCopyThreads)});
  }
  launcher().run(launches);
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<CopyFromHost, &run>(m); }

}  // namespace torch_gdn
