#pragma once
#include <ATen/core/Tensor.h>

namespace torch_gdn {

// Reads the numbers of an index tensor on the CPU in place. It is int32 or int64, and [N] or [N, M]. A conversion by
// PyTorch takes a microsecond, as long as a whole step of the convolution for one sequence.
class Indices {
 public:
  explicit Indices(const at::Tensor& x)
      : data_(static_cast<const char*>(x.const_data_ptr())),
        is_wide_(x.scalar_type() == at::kLong),
        size_(x.size(0)),
        row_(x.stride(0) * x.element_size()),
        column_(x.dim() > 1 ? x.stride(1) * x.element_size() : 0) {}

  int64_t size() const { return size_; }
  int64_t operator[](int64_t row) const { return at(row, 0); }
  int64_t at(int64_t row, int64_t column) const {
    const char* number = data_ + row * row_ + column * column_;
    return is_wide_ ? *reinterpret_cast<const int64_t*>(number) : *reinterpret_cast<const int32_t*>(number);
  }

 private:
  const char* data_;
  bool is_wide_;
  int64_t size_, row_, column_;
};

// Calls f(index, position) for indices [N] or [N, M].
template <typename F>
void for_each_index(const at::Tensor& x, const F& f) {
  const Indices indices(x);
  const int64_t columns = x.dim() > 1 ? x.size(1) : 1;
  for (int64_t i = 0; i < x.numel(); ++i) f(indices.at(i / columns, i % columns), i);
}

// Checks that the boundaries of cu_seqlens ascend.
void check_ascending(const char* op, const Indices& boundaries);

}  // namespace torch_gdn
