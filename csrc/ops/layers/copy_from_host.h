// Copies a small host array to the device without waiting.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>

#include "ops/op.h"

namespace torch_gdn {

template <typename Int>
struct CopyFromHost {
  static constexpr const char* kSchema = "copy_from_host_(Tensor(a!) dst, Tensor src) -> ()";

  Tensor dst, src;

  auto arguments() { return std::tie(dst, src); }

  void check(const char* op) const {
    const Check<Int> check(op, "dst", dst);
    check.on_device_or_cpu("src", src);
    check.same_dtype("src", src, "dst", dst);
    const auto sizes = sizes_of<Int>(dst), got = sizes_of<Int>(src);
    bool equal = got.size() == sizes.size();
    for (size_t i = 0; equal && i < sizes.size(); ++i) equal = holds(sym_eq(got[i], sizes[i]));
    check.value(equal, "src", "the shape of dst", got, " for ", sizes);
    check.value(dst.is_contiguous(), "dst", "a contiguous tensor", dst.sym_strides(), " as strides");
  }

  void outputs() const {}

  // PyTorch makes the copy, below autograd. As in every op here, dst may be an inference tensor.
  void copy() const {
    const at::AutoDispatchBelowADInplaceOrView guard;
    dst.copy_(src);
  }
};

}  // namespace torch_gdn
