// The ops on packed weights.
#pragma once
#include "ops/indices.h"
#include "ops/quantized/packed.h"

namespace torch_gdn {

// Computes y = x W^T + bias with packed W. Sums are f32, and y is rounded once.
template <typename Int>
struct QuantizedLinear {
  static constexpr const char* kSchema =
      "quantized_linear(Tensor x, Tensor weight, Tensor scales, Tensor? biases, Tensor? bias=None) -> Tensor";

  Tensor x, weight, scales;
  optional<Tensor> biases, bias;

  Int N = 0, K = 0;
  Packing packing;

  auto arguments() { return std::tie(x, weight, scales, biases, bias); }

  void check(const char* op) {
    const Check<Int> check(op, "x", x);
    check.is_rows("x", x);
    K = size_of<Int>(x, -1);
    check.value(sym_ge(K, Int(1)), "x", "at least one column", K);
    check.dimensions("weight", weight, 2, "[N, K * bits / 32] or [N, K]");
    N = size_of<Int>(weight, 0);
    check.value(sym_ge(N, Int(1)), "weight", "at least one row", N);
    packing = check_packed(check, {"weight", "scales", "biases"}, weight, scales, biases, Sizes<Int>{N}, K);
    if (!bias.has_value()) return;
    check.is_activation("bias", *bias).shape("[N]", {N});
  }

  Tensor outputs() const { return empty<Int>(with_last(sizes_without_last<Int>(x), N), x.options()); }
};

// Returns rows of packed weights as numbers: all of them, or those that `indices` name, for example for an embedding.
template <typename Int>
struct Dequantize {
  static constexpr const char* kSchema =
      "dequantize(Tensor weight, Tensor scales, Tensor? biases, int bits, Tensor? indices=None, "
      "ScalarType? dtype=None) -> Tensor";

  Tensor weight, scales;
  optional<Tensor> biases;
  int64_t bits;
  optional<Tensor> indices;
  optional<at::ScalarType> dtype;

  Int N = 0;
  int64_t K = 0;
  Packing packing;

  auto arguments() { return std::tie(weight, scales, biases, bits, indices, dtype); }
  at::ScalarType dtype_of_output() const { return dtype.value_or(scales.scalar_type()); }

  void check(const char* op) {
    const Check<Int> check(op, "weight", weight);
    check.is_packed("weight", weight).dimensions(2, "[N, K * bits / 32] or [N, K]");
    const bool is_e4m3 = weight.scalar_type() == at::kByte;
    check.value(is_e4m3 ? bits == 8 : bits == 4 || bits == 8, "bits", "4 or 8, and 8 for e4m3 in uint8", bits);
    N = size_of<Int>(weight, 0);
    check.value(sym_ge(N, Int(1)), "weight", "at least one row", N);
    const int64_t words = known(size_of<Int>(weight, 1));
    check.value(words >= 1, "weight", "at least one column", words);
    K = is_e4m3 ? words : words * 32 / bits;
    packing = check_packed(check, {"weight", "scales", "biases"}, weight, scales, biases, Sizes<Int>{N}, Int(K), bits);
    check.is_activation("dtype", dtype_of_output());
    if (indices.has_value()) check_indices(check);
  }

  Tensor outputs() const {
    const auto rows = indices.has_value() ? Sizes<Int>(sizes_of<Int>(*indices)) : Sizes<Int>{N};
    return empty<Int>(with_last(rows, Int(K)), scales.options().dtype(dtype_of_output()));
  }

 private:
  void check_indices(const Check<Int>& check) {
    check.is_index("indices", *indices);
    check.on_device("indices", *indices);
    if constexpr (is_run<Int>) {
      if (!indices->is_cpu()) return;  // the kernel checks indices on the device
      const Tensor flat = indices->reshape({-1});
      for_each_index(flat, [&](int64_t row, int64_t) {
        check.value(row >= 0 && row < N, "indices", "rows from 0 to N - 1", row, " for N of ", N);
      });
    }
  }
};

}  // namespace torch_gdn
