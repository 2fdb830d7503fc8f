#include <ATen/core/Tensor.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "host_view.h"
#include "mps_simulator/engine/engine.h"
#include "mps_simulator/metal/device.h"

namespace simulator {

const void* buffer_of(const at::Tensor& tensor) { return tensor.storage().data(); }

at::Tensor host_view(const at::Tensor& tensor) {
  std::byte* data = nullptr;
  if (tensor.is_mps()) {
    if (const void* buffer = buffer_of(tensor))
      data = buffer_data(buffer) + tensor.storage_offset() * tensor.itemsize();
  } else {
    data = static_cast<std::byte*>(const_cast<void*>(tensor.const_data_ptr()));
  }
  at::Tensor view = at::from_blob(data, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()));
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

namespace {

struct Dimension {
  int64_t size, stride;
};

void report_runs(const std::byte* first, const Dimension* dimension, const Dimension* end, size_t run) {
  if (dimension == end) return memory_written(first, run);
  for (int64_t i = 0; i < dimension->size; i++) report_runs(first + i * dimension->stride, dimension + 1, end, run);
}

// Copies without the dispatch modes and transforms of the thread that waits for the stream.
void copy_on_host(at::Tensor& destination, const at::Tensor& source) {
  const c10::impl::ExcludeDispatchKeyGuard guard(
      c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset | c10::python_ks |
      c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode, c10::DispatchKey::Functionalize}));
  at::native::copy_(destination, source, false);
}

}  // namespace

void report_written(const at::Tensor& view) {
  if (view.numel() == 0) return;
  std::vector<Dimension> dimensions;
  const auto item = static_cast<int64_t>(view.itemsize());
  for (int64_t d = 0; d < view.dim(); d++)
    if (view.size(d) > 1) dimensions.push_back({view.size(d), view.stride(d) * item});
  std::sort(dimensions.begin(), dimensions.end(),
            [](const Dimension& a, const Dimension& b) { return a.stride > b.stride; });
  int64_t run = item;
  while (!dimensions.empty() && dimensions.back().stride == run) {
    run *= dimensions.back().size;
    dimensions.pop_back();
  }
  const Dimension* first = dimensions.data();
  report_runs(static_cast<const std::byte*>(view.const_data_ptr()), first, first + dimensions.size(), run);
}

namespace {

std::array<std::atomic<uint64_t>, 3> counted_copies{};

}  // namespace

std::map<std::string, uint64_t> copies() {
  return {
      {"to the device", counted_copies[0]}, {"to the host", counted_copies[1]}, {"on the device", counted_copies[2]}};
}

void copy_between(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  if (source.numel() == 0) return;
  const bool from_device = source.is_mps(), to_device = destination.is_mps();
  ++counted_copies[!from_device ? 0 : !to_device ? 1 : 2];
  auto work = [from = host_view(source), to = host_view(destination), to_device]() mutable {
    copy_on_host(to, from);
    if (to_device) report_written(to);
  };
  if (from_device != to_device && !non_blocking) {
    wait_for_stream();
    return work();
  }
  std::vector<const void*> buffers;
  if (from_device) buffers.push_back(buffer_of(source));
  if (to_device) buffers.push_back(buffer_of(destination));
  // The command keeps the host memory alive. The command buffer retains the device memory.
  c10::Storage host = from_device ? to_device ? c10::Storage() : destination.storage() : source.storage();
  enqueue([work = std::move(work), host]() mutable { work(); }, buffers);
  if (from_device != to_device) commit_stream();
}

namespace {

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  copy_between(source.expand(destination.sizes()), destination, non_blocking);
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
  destination.resize_(source.sizes());
  return copy_from(source, destination, false);
}

at::Tensor& copy_(at::Tensor& destination, const at::Tensor& source, bool non_blocking) {
  copy_between(source.expand(destination.sizes()), destination, non_blocking);
  return destination;
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  wait_for_stream();
  return host_view(tensor).item();
}

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
}

}  // namespace
}  // namespace simulator
