// Makes tensors and views. These ops cannot fall back to the CPU.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DefaultDtype.h>
#include <torch/library.h>

#include <cstring>

#include "allocator.h"
#include "host_view.h"
#include "mps_simulator/engine/engine.h"
#include "mps_simulator/metal/device.h"

namespace simulator {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::MPS);

void check_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype != at::kDouble,
                   "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please "
                   "use float32 instead.");
  TORCH_CHECK_TYPE(dtype != at::kComplexDouble,
                   "Trying to convert ComplexDouble to the MPS backend but it does not have support for that dtype.");
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == at::kStrided,
                              "only strided tensors are supported on MPS");
  TORCH_CHECK(size.size() <= 16, "MPS supports tensors with dimensions <= 16, but got ", size.size(), ".");
  check_dtype(c10::dtype_or_default(dtype));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &Allocator::instance(), kKeys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  check_dtype(c10::dtype_or_default(dtype));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &Allocator::instance(), kKeys, c10::dtype_or_default(dtype));
}

// Makes a tensor of zeros without memory. Forward-mode gradients use it for tangents that are known to be zero.
at::Tensor zeros_without_memory(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  static at::native::ZeroTensorAllocator allocator(c10::Device(at::kMPS, 0));
  check_dtype(c10::dtype_or_default(dtype));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   kKeys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor),
                                   c10::dtype_or_default(dtype), std::nullopt);
}

// Grows the storage. Its content is moved in stream order.
void grow(c10::Storage storage, size_t bytes) {
  const size_t old_bytes = storage.nbytes();
  c10::DataPtr grown = Allocator::instance().allocate(bytes);
  if (old_bytes) Allocator::instance().copy_data(grown.get(), storage.data(), old_bytes);
  storage.set_data_ptr_noswap(std::move(grown));
  storage.set_nbytes(bytes);
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef symbolic,
                          std::optional<at::MemoryFormat> format) {
  const at::IntArrayRef size = C10_AS_INTARRAYREF_SLOW(symbolic);
  at::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() != size) {
    const size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
    if (bytes > self.storage().nbytes()) grow(self.storage(), bytes);
    impl->set_sizes_contiguous(size);
  }
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt symbolic_offset,
                        c10::SymIntArrayRef symbolic_size, c10::SymIntArrayRef symbolic_stride) {
  const int64_t offset = symbolic_offset.expect_int();
  const at::IntArrayRef size = C10_AS_INTARRAYREF_SLOW(symbolic_size);
  const at::IntArrayRef stride = C10_AS_INTARRAYREF_SLOW(symbolic_stride);
  const size_t bytes = stride.empty() ? at::detail::computeStorageNbytesContiguous(size, self.itemsize(), offset)
                                      : at::detail::computeStorageNbytes(size, stride, self.itemsize(), offset);
  if (bytes > storage.nbytes()) grow(storage, bytes);
  at::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty())
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const c10::SymInt count(static_cast<int64_t>(storage.nbytes() / self.itemsize()));
  return set_storage(self, std::move(storage), 0, c10::SymIntArrayRef(count), {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  Allocator& allocator = Allocator::instance();
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true);
  return set_whole_storage(self, std::move(storage));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", zeros_without_memory);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
}

}  // namespace
}  // namespace simulator
