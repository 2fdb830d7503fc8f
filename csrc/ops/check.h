// Errors read "<op>: <argument>: expected <what>, got <what>". They are ValueErrors, or TypeErrors for a wrong dtype.
// Sizes are int64_t when an op runs, and SymInt when torch.compile asks for its outputs.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

namespace torch_gdn {

using at::Tensor;
using c10::sym_eq, c10::sym_ge, c10::sym_le;
using std::optional;

inline bool holds(bool condition) { return condition; }
// Adds a guard, or an assertion if the size is known only at run time.
inline bool holds(const c10::SymBool& condition) { return condition.expect_true(__FILE__, __LINE__); }

// True if the op runs, so that index tensors can be read. False if the caller only wants its outputs.
template <typename Int>
constexpr bool is_run = std::is_same_v<Int, int64_t>;

template <typename Int>
Int size_of(const Tensor& x, int64_t dimension) {
  if constexpr (is_run<Int>) {
    return x.size(dimension);
  } else {
    return x.sym_size(dimension);
  }
}

template <typename Int>
c10::ArrayRef<Int> sizes_of(const Tensor& x) {
  if constexpr (is_run<Int>) {
    return x.sizes();
  } else {
    return x.sym_sizes();
  }
}

template <typename Int>
bool are_equal(c10::ArrayRef<Int> a, c10::ArrayRef<Int> b) {
  bool equal = a.size() == b.size();
  for (size_t i = 0; equal && i < a.size(); ++i) equal = holds(sym_eq(a[i], b[i]));
  return equal;
}

// Avoids the heap, because a decoding step checks many shapes.
template <typename Int>
using Sizes = c10::SmallVector<Int, 6>;

template <typename Int>
Sizes<Int> sizes_without_last(const Tensor& x) {
  const auto sizes = sizes_of<Int>(x).slice(0, x.dim() - 1);
  return Sizes<Int>(sizes.begin(), sizes.end());
}

template <typename Int>
Sizes<Int> with_last(Sizes<Int> sizes, const Int& last) {
  sizes.push_back(last);
  return sizes;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline c10::SymInt ceil_div(const c10::SymInt& a, const c10::SymInt& b) { return (a + b - 1) / b; }

// PyTorch accepts any number as a dtype.
inline std::string dtype_name(at::ScalarType dtype) {
  const int number = static_cast<int>(dtype);
  const bool is_one = number >= 0 && number < static_cast<int>(at::ScalarType::Undefined);
  return is_one ? std::string(c10::getDtypeNames(dtype).first)
                : "no known dtype (number " + std::to_string(number) + ")";
}

// The checks of one call. The first tensor decides the device.
template <typename Int>
class Check {
 public:
  Check(const char* op, const char* first, const Tensor& tensor) : op_(op), first_(first), device_(tensor.device()) {}

  template <typename Condition, typename... Got>
  void value(const Condition& condition, const char* argument, const char* expected, const Got&... got) const {
    TORCH_CHECK_VALUE(holds(condition), op_, ": ", argument, ": expected ", expected, ", got ", got...);
  }

  void in_range(const char* argument, const char* expected, const Int& x, int64_t least, int64_t most) const {
    value(sym_ge(x, Int(least)), argument, expected, x);
    value(sym_le(x, Int(most)), argument, expected, x);
  }

  void dimensions(const char* argument, const Tensor& x, int64_t count, const char* pattern) const {
    TORCH_CHECK_VALUE(x.dim() == count, op_, ": ", argument, ": expected ", count, " dimensions ", pattern, ", got ",
                      x.dim(), " of shape ", sizes_of<Int>(x));
    on_device(argument, x);
  }

  // Checks rows of numbers [.., D].
  void is_rows(const char* argument, const Tensor& x) const {
    is_activation(argument, x);
    value(x.dim() >= 1, argument, "at least one dimension", x.dim());
  }

  void shape(const char* argument, const Tensor& x, const char* pattern, c10::ArrayRef<Int> sizes) const {
    const auto got = sizes_of<Int>(x);
    TORCH_CHECK_VALUE(are_equal(got, sizes), op_, ": ", argument, ": expected shape ", pattern, " = ", sizes, ", got ",
                      got, layout_hint(pattern, sizes, got));
    on_device(argument, x);
  }

  void shape(const char* argument, const Tensor& x, const char* pattern, std::initializer_list<Int> sizes) const {
    shape(argument, x, pattern, c10::ArrayRef<Int>(sizes.begin(), sizes.size()));
  }

  void same_shape(const char* argument, const Tensor& x, const char* name, const Tensor& other) const {
    const auto got = sizes_of<Int>(x), sizes = sizes_of<Int>(other);
    TORCH_CHECK_VALUE(are_equal(got, sizes), op_, ": ", argument, ": expected the shape of ", name, ", got ", got,
                      " for ", sizes);
    on_device(argument, x);
  }

  void on_device(const char* argument, const Tensor& x) const {
    TORCH_CHECK_VALUE(x.device() == device_, op_, ": ", argument, ": expected a tensor on ", device_, " like ", first_,
                      ", got one on ", x.device());
  }

  // Index tensors may stay on the CPU.
  void on_device_or_cpu(const char* argument, const Tensor& x) const {
    TORCH_CHECK_VALUE(x.is_cpu() || x.device() == device_, op_, ": ", argument, ": expected a tensor on the CPU or on ",
                      device_, " like ", first_, ", got one on ", x.device());
  }

  // An argument whose dtype is right.
  struct Typed {
    const Check& check;
    const char* argument;
    const Tensor& x;

    void dimensions(int64_t count, const char* pattern) const { check.dimensions(argument, x, count, pattern); }
    void shape(const char* pattern, c10::ArrayRef<Int> sizes) const { check.shape(argument, x, pattern, sizes); }
    void shape(const char* pattern, std::initializer_list<Int> sizes) const {
      check.shape(argument, x, pattern, sizes);
    }
  };

  Typed is_activation(const char* argument, const Tensor& x) const {
    is_activation(argument, x.scalar_type());
    return {*this, argument, x};
  }

  void is_activation(const char* argument, at::ScalarType dtype) const {
    is_dtype(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, argument,
             "dtype bfloat16, float16 or float32", dtype);
  }

  Typed is_floating(const char* argument, const Tensor& x) const {
    return is_dtype(at::isFloatingType(x.scalar_type()), argument, "a floating dtype", x);
  }

  Typed is_float32(const char* argument, const Tensor& x) const {
    return is_dtype(x.scalar_type() == at::kFloat, argument, "dtype float32", x);
  }

  Typed is_int32(const char* argument, const Tensor& x) const {
    return is_dtype(x.scalar_type() == at::kInt, argument, "dtype int32", x);
  }

  Typed is_packed(const char* argument, const Tensor& x) const {
    return is_dtype(x.scalar_type() == at::kInt || x.scalar_type() == at::kByte, argument, "dtype int32 or uint8", x);
  }

  Typed is_uint8(const char* argument, const Tensor& x) const {
    return is_dtype(x.scalar_type() == at::kByte, argument, "dtype uint8", x);
  }

  Typed is_index(const char* argument, const Tensor& x) const {
    return is_dtype(x.scalar_type() == at::kInt || x.scalar_type() == at::kLong, argument, "dtype int32 or int64", x);
  }

  Typed is_bool(const char* argument, const Tensor& x) const {
    return is_dtype(x.scalar_type() == at::kBool, argument, "dtype bool", x);
  }

  Typed is_of_dtype(const char* argument, const Tensor& x, at::ScalarType dtype) const {
    TORCH_CHECK_TYPE(x.scalar_type() == dtype, op_, ": ", argument, ": expected dtype ", dtype_name(dtype), ", got ",
                     dtype_name(x.scalar_type()));
    return {*this, argument, x};
  }

  Typed same_dtype(const char* argument, const Tensor& x, const char* name, const Tensor& other) const {
    TORCH_CHECK_TYPE(x.scalar_type() == other.scalar_type(), op_, ": ", argument, ": expected dtype ",
                     dtype_name(other.scalar_type()), " like ", name, ", got ", dtype_name(x.scalar_type()));
    return {*this, argument, x};
  }

  void like(const char* argument, const Tensor& x, const char* name, const Tensor& other) const {
    same_dtype(argument, x, name, other);
    same_shape(argument, x, name, other);
  }

  // Checks indices that the host may read.
  void is_index_array(const char* argument, const Tensor& x) const {
    is_index(argument, x);
    on_device_or_cpu(argument, x);
  }

  // Checks indices with one number per sequence.
  void is_number_per_sequence(const char* argument, const Tensor& x, const Int& N,
                              const char* expected = "shape [N], one per sequence") const {
    is_index_array(argument, x);
    value(x.dim() == 1 && holds(sym_eq(size_of<Int>(x, 0), N)), argument, expected, sizes_of<Int>(x), " for ", N,
          " sequences");
  }

  // Checks a tensor that the caller allocated for a result.
  void is_output(const char* argument, const Tensor& x, const char* pattern, std::initializer_list<Int> sizes,
                 at::ScalarType dtype) const {
    shape(argument, x, pattern, sizes);
    is_of_dtype(argument, x, dtype);
    const auto stride = x.sym_stride(-1);
    value(sym_eq(stride, c10::SymInt(1)), argument, "a last stride of 1", stride);
  }

  const char* op() const { return op_; }

 private:
  Typed is_dtype(bool condition, const char* argument, const char* expected, const Tensor& x) const {
    is_dtype(condition, argument, expected, x.scalar_type());
    return {*this, argument, x};
  }

  void is_dtype(bool condition, const char* argument, const char* expected, at::ScalarType got) const {
    TORCH_CHECK_TYPE(condition, op_, ": ", argument, ": expected ", expected, ", got ", dtype_name(got));
  }

  // Other libraries lay tensors out as [B, H, T, ...]. T then has the place of the number of heads, and is usually
  // larger.
  static const char* layout_hint(const std::string& pattern, c10::ArrayRef<Int> sizes, c10::ArrayRef<Int> got) {
    if constexpr (is_run<Int>) {
      const bool has_tokens_and_heads = pattern.rfind("[B, T, H", 0) == 0;
      if (has_tokens_and_heads && sizes.size() >= 3 && got.size() == sizes.size() && got[1] != sizes[1] &&
          sizes[1] < sizes[2]) {
        return " (is the layout [B, H, T, ...]? It must be [B, T, H, ...])";
      }
    }
    return "";
  }

  const char* op_;
  const char* first_;
  at::Device device_;
};

// Checks that the last stride is 1. This is for tensors that are too large to copy.
template <typename Int>
void check_unit_stride(const Check<Int>& check, const char* argument, const Tensor& x,
                       const char* expected = "a last stride of 1") {
  const auto stride = x.sym_stride(-1);
  const bool one = holds(sym_le(size_of<Int>(x, -1), Int(1))) || holds(sym_eq(stride, c10::SymInt(1)));
  check.value(one, argument, expected, stride);
}

}  // namespace torch_gdn
