#pragma once
#include <ATen/core/LegacyTypeDispatch.h>

#include "ops/op.h"
#include "ops/ranges.h"

namespace torch_gdn {

// Copies ranges of bytes within an engine's buffer, in place.
template <typename Int>
struct BatchCopy {
  static constexpr const char* kSchema =
      "batch_copy_(Tensor(a!) pool, Tensor source_offsets, Tensor destination_offsets, Tensor sizes) -> ()";

  Tensor pool;
  ByteRanges ranges;

  auto arguments() { return std::tie(pool, ranges.source_offsets, ranges.destination_offsets, ranges.sizes); }

  void check(const char* op) const {
    const Check<Int> check(op, "pool", pool);
    check.is_uint8("pool", pool).dimensions(1, "[bytes]");
    const auto stride = pool.sym_stride(0);
    check.value(sym_eq(stride, c10::SymInt(1)), "pool", "a stride of 1", stride);
    check_numbers(check, "sizes", ranges.sizes);
    check_numbers(check, "source_offsets", ranges.source_offsets);
    check_numbers(check, "destination_offsets", ranges.destination_offsets);
    if constexpr (is_run<Int>) {
      if (ranges.are_on_cpu()) check_ranges("batch_copy_", ranges, pool.size(0));
    }
  }

  void outputs() const {}

 private:
  void check_numbers(const Check<Int>& check, const char* argument, const Tensor& x) const {
    check.is_index_array(argument, x);
    const bool fits = x.dim() == 1 && holds(sym_eq(size_of<Int>(x, 0), size_of<Int>(ranges.sizes, 0)));
    check.value(fits, argument, "shape [n] like sizes", sizes_of<Int>(x));
  }
};

// Copies a small host array to the device without waiting.
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
    check.value(are_equal(got, sizes), "src", "the shape of dst", got, " for ", sizes);
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
