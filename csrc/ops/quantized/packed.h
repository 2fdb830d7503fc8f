// Packed weights of two kinds. Codes in int32: w[n, k] = scales[n, k / group] * code[n, k] + biases[n, k / group].
// Biases of dtype uint8 are zero points, which stand for -scale * zero point; the scales then have 16 bits. A code has
// 4 or 8 bits. A word holds per = 32 / bits codes, and code k of a row has bits (k % per) * bits of word k / per. A
// group has 32, 64 or 128 codes. The shapes give bits and group. Numbers of 8 bits in uint8, which are e4m3
// (float8_e4m3fn): w[n, k] = scales[n / rows, k / group] * number[n, k]. A scale belongs to 128 rows, to one or to all,
// and to 128 columns or to all; the last blocks may be smaller. Codes of 4 bits with scales of dtype uint8 are MXFP4:
// e2m1 numbers, and e8m0 scales 2^(scale - 127) of 32 columns; w[n, k] = scale * number[n, k].
#pragma once
#include "ops/op.h"

namespace torch_gdn {

constexpr int64_t kBlock = 128;                     // rows and columns of a block of e4m3 numbers
constexpr int64_t kAllTogether = int64_t(1) << 31;  // in the place of a number of rows or columns: all of them

struct Packing {
  int64_t bits = 0, group = 0;  // 0 if the weights are not packed
  int64_t rows = 1;             // rows that share a scale
  bool is_e4m3 = false, is_e2m1 = false;

  bool operator==(const Packing&) const = default;
};

// The names of a packed matrix's tensors in errors.
struct PackedNames {
  const char *weight, *scales, *biases;
};

// A matrix is packed if it has scales and biases.
struct PackedWeight {
  PackedNames names;
  const Tensor& weight;
  const optional<Tensor>&scales, &biases;
};

constexpr const char* kNoCopyOfWeights = "a last stride of 1 (a step must not copy weights)";

// Weight sizes are constants. A compiled model is specialised for them.
inline int64_t known(int64_t size) { return size; }
inline int64_t known(const c10::SymInt& size) { return size.guard_int(__FILE__, __LINE__); }

inline bool has_zero_points(const Tensor& biases) { return biases.scalar_type() == at::kByte; }

// Checks scales and biases [rows..., K / group], and returns the group.
template <typename Int>
int64_t check_scales(const Check<Int>& check, const PackedNames& names, const Tensor& scales, const Tensor& biases,
                     const Sizes<Int>& rows, int64_t columns) {
  check.is_activation(names.scales, scales);
  check.dimensions(names.scales, scales, int64_t(rows.size()) + 1, "[..., K / group]");
  const int64_t groups = known(size_of<Int>(scales, -1));
  const int64_t group = groups > 0 && columns % groups == 0 ? columns / groups : 0;
  check.value(group == 32 || group == 64 || group == 128, names.scales, "K / 32, K / 64 or K / 128 columns", groups,
              " for K of ", columns);
  const auto sizes = with_last(rows, Int(groups));
  check.shape(names.scales, scales, "[..., K / group]", sizes);
  check_unit_stride(check, names.scales, scales, kNoCopyOfWeights);
  const bool may_have_zero_points = scales.scalar_type() != at::kFloat;
  if (!may_have_zero_points || !has_zero_points(biases)) check.same_dtype(names.biases, biases, names.scales, scales);
  check.shape(names.biases, biases, "[..., K / group]", sizes);
  check_unit_stride(check, names.biases, biases, kNoCopyOfWeights);
  return group;
}

// Checks e4m3 numbers [rows..., K] with scales [..., rows of scales, groups].
template <typename Int>
Packing check_e4m3(const Check<Int>& check, const PackedNames& names, const Tensor& weight, const Tensor& scales,
                   const Sizes<Int>& rows, int64_t K) {
  check.shape(names.weight, weight, "[..., K]", with_last(rows, Int(K)));
  check_unit_stride(check, names.weight, weight, kNoCopyOfWeights);
  check.is_activation(names.scales, scales);
  check.dimensions(names.scales, scales, int64_t(rows.size()) + 1, "[..., N / 128, K / 128]");
  const int64_t N = known(rows.back());
  const int64_t scale_rows = known(size_of<Int>(scales, -2)), groups = known(size_of<Int>(scales, -1));
  const int64_t row_blocks = (N + kBlock - 1) / kBlock, column_blocks = (K + kBlock - 1) / kBlock;
  check.value(scale_rows == row_blocks || scale_rows == N || scale_rows == 1, names.scales,
              "a row for each 128 rows of the weight, for each one, or for all", scale_rows, " for ", N);
  check.value(groups == column_blocks || groups == 1, names.scales, "a column for each 128 columns, or for all", groups,
              " for ", K);
  Sizes<Int> sizes(rows.begin(), rows.end() - 1);
  sizes.push_back(Int(scale_rows));
  check.shape(names.scales, scales, "[..., N / 128, K / 128]", with_last(std::move(sizes), Int(groups)));
  check_unit_stride(check, names.scales, scales, kNoCopyOfWeights);
  const int64_t rows_of_scale = scale_rows == row_blocks ? kBlock : scale_rows == N ? 1 : kAllTogether;
  return {8, groups == column_blocks ? kBlock : kAllTogether, rows_of_scale, true};
}

// Checks e8m0 scales [rows..., K / 32] of e2m1 numbers.
template <typename Int>
Packing check_e2m1(const Check<Int>& check, const PackedNames& names, const Tensor& scales, const Sizes<Int>& rows,
                   int64_t bits, int64_t K) {
  check.value(bits == 4, names.scales, "scales of a floating dtype for codes of 8 bits", "uint8");
  check.value(K % 32 == 0, names.weight, "a multiple of 32 columns for scales of dtype uint8", K);
  check.shape(names.scales, scales, "[..., K / 32]", with_last(rows, Int(K / 32)));
  check_unit_stride(check, names.scales, scales, kNoCopyOfWeights);
  return {4, 32, 1, false, true};
}

// Checks a weight [rows..., K * bits / 32] of codes, or [rows..., K] of e4m3 numbers, that multiplies vectors of K
// columns.
template <typename Int>
Packing check_packed(const Check<Int>& check, const PackedNames& names, const Tensor& weight, const Tensor& scales,
                     const optional<Tensor>& given_biases, const Sizes<Int>& rows, const Int& columns,
                     int64_t known_bits = 0) {
  check.is_packed(names.weight, weight);
  const bool is_e4m3 = weight.scalar_type() == at::kByte;
  const bool is_e2m1 = !is_e4m3 && scales.scalar_type() == at::kByte;
  check.value(given_biases.has_value() != (is_e4m3 || is_e2m1), names.biases,
              "a tensor for codes in int32, None for e4m3 in uint8 and for scales in uint8",
              given_biases.has_value() ? "a tensor" : "None");
  if (is_e4m3) return check_e4m3(check, names, weight, scales, rows, known(columns));
  check.dimensions(names.weight, weight, int64_t(rows.size()) + 1, "[..., K * bits / 32]");
  const int64_t words = known(size_of<Int>(weight, -1)), K = known(columns);
  const int64_t bits = known_bits != 0 ? known_bits : words * 8 == K ? 4 : 8;
  check.value(words > 0 && words * 32 == K * bits, names.weight, "K / 8 words of 4-bit codes or K / 4 of 8-bit codes",
              words, " for K of ", K);
  check.shape(names.weight, weight, "[..., K * bits / 32]", with_last(rows, Int(words)));
  check_unit_stride(check, names.weight, weight, kNoCopyOfWeights);
  if (is_e2m1) return check_e2m1(check, names, scales, rows, bits, K);
  return {bits, check_scales(check, names, scales, *given_biases, rows, K)};
}

}  // namespace torch_gdn
