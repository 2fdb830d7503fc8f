// Copies ranges of bytes within an engine's buffer, in place.
#pragma once
#include "ops/op.h"
#include "ops/ranges.h"

namespace torch_gdn {

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
    check.is_index(argument, x);
    check.on_device_or_cpu(argument, x);
    const bool fits = x.dim() == 1 && holds(sym_eq(size_of<Int>(x, 0), size_of<Int>(ranges.sizes, 0)));
    check.value(fits, argument, "shape [n] like sizes", sizes_of<Int>(x));
  }
};

}  // namespace torch_gdn
