// Decodes codes to vectors, or to rotated vectors if `rotated`.
#pragma once
#include "ops/aura/aura.h"

namespace torch_gdn {

template <typename Int>
struct AuraDecode {
  static constexpr const char* kSchema =
      "aura_decode(Tensor codes, Tensor norms, Tensor codebook, Tensor signs, bool rotated=False, "
      "ScalarType? dtype=None, Tensor? tile_means=None) -> Tensor";

  CodedTensor vectors;
  Tensor signs;
  bool rotated;
  optional<at::ScalarType> dtype;

  Int D;
  Code code;

  auto arguments() {
    return std::tie(vectors.codes, vectors.norms, vectors.codebook, signs, rotated, dtype, vectors.tile_means);
  }

  void check(const char* op) {
    const auto& [codes, norms, codebook, tile_means] = vectors;
    const Check<Int> check(op, "codes", codes);
    check.is_int32("codes", codes);
    check.at_least_one_dimension("codes", codes);
    check.is_float32("signs", signs).dimensions(1, "[D]");
    D = check_head_size(check, "signs", size_of<Int>(signs, 0));
    code = check_codebook(check, "codebook", codebook);
    const auto rows = sizes_without_last<Int>(codes);
    check_codes(check, "codes", codes, rows, D, code);
    check_norms(check, "norms", norms, rows);
    if (tile_means.has_value()) {
      check.dimensions("codes", codes, 4, "[B, HK, T, ceil(D * bits / 32)]");
      check_tile_means(check, "tile_means", *tile_means, rows[0], rows[1], rows[2], D);
    }
    check.is_activation("dtype", dtype.value_or(at::kFloat));
  }

  Tensor outputs() const {
    return empty<Int>(with_last(sizes_without_last<Int>(vectors.codes), D),
                      vectors.norms.options().dtype(dtype.value_or(at::kFloat)));
  }
};

}  // namespace torch_gdn
