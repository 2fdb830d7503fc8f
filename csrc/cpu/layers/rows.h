#pragma once
#include "cpu/common.h"

namespace torch_gdn::cpu {

constexpr int64_t kElementsPerCore = 16384;  // at least

// Returns x as [B, T, heads, D] with a last stride of 1.
inline Tensor four_dimensions(const Tensor& x_any, const char* name) {
  Tensor x = unit_last_stride(x_any, name);
  while (x.dim() < 4) x = x.unsqueeze(0);
  return x.dim() > 4 ? x.reshape({1, -1, 1, x.size(-1)}) : x;
}

// The rows of [B, T, heads, D] in order. Its strides are arbitrary, except that the last one is 1.
class RowsOf {
 public:
  explicit RowsOf(const Tensor& x)
      : data_(static_cast<const char*>(x.const_data_ptr())),
        item_size_(x.element_size()),
        tokens_(x.size(1)),
        heads_(x.size(2)),
        batch_stride_(x.stride(0)),
        token_stride_(x.stride(1)),
        head_stride_(x.stride(2)),
        D_(x.size(3)),
        dense_(x.is_contiguous()) {}

  const void* at(int64_t row) const {
    if (dense_) return data_ + row * D_ * item_size_;
    const int64_t token = row / heads_, head = row % heads_;
    return data_ +
           (token / tokens_ * batch_stride_ + token % tokens_ * token_stride_ + head * head_stride_) * item_size_;
  }
  // Returns how many of `count` rows from `row` on are `stride()` apart.
  int64_t evenly_spaced(int64_t row, int64_t count) const {
    return dense_ ? count : std::min(count, heads_ - row % heads_);
  }
  int64_t stride() const { return dense_ ? D_ : head_stride_; }

 private:
  const char* data_;
  int64_t item_size_, tokens_, heads_, batch_stride_, token_stride_, head_stride_, D_;
  bool dense_;
};

}  // namespace torch_gdn::cpu
