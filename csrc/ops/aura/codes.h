// The ops that turn vectors into codes, and codes into vectors.
#pragma once
#include "ops/aura/aura.h"
#include "ops/indices.h"

namespace torch_gdn {

// Computes scale Pi x, or scale Pi^T x if `inverse`, for each vector x.
template <typename Int>
struct AuraRotate {
  static constexpr const char* kSchema =
      "aura_rotate(Tensor x, Tensor signs, float scale=1.0, bool inverse=False) -> Tensor";

  Tensor x, signs;
  double scale;
  bool inverse;

  auto arguments() { return std::tie(x, signs, scale, inverse); }

  void check(const char* op) const {
    const Check<Int> check(op, "x", x);
    check.is_rows("x", x);
    check_table(check, "signs", signs, "[D]", check_head_size(check, "x", size_of<Int>(x, -1)));
  }

  Tensor outputs() const { return empty(sizes_of<Int>(x), x.options().dtype(at::kFloat)); }
};

// codes are int32 [.., words], and norms float16 [..].
struct EncodedVectors {
  Tensor codes, norms;
};

template <typename Int>
struct AuraEncoder {
  Tensor x, signs, codebook;
  optional<Tensor> boundaries;

  Int D;
  Code code;

  void check_codec(const Check<Int>& check) {
    check.is_rows("x", x);
    D = check_head_size(check, "x", size_of<Int>(x, -1));
    check_table(check, "signs", signs, "[D]", D);
    code = check_codebook(check, "codebook", codebook);
    check.value(code.is_trellis() != boundaries.has_value(), "boundaries",
                code.is_trellis() ? "None for the codebook of a trellis" : "a tensor for a codebook of one dimension",
                boundaries.has_value() ? "a tensor" : "None");
    if (!boundaries.has_value()) return;
    check_table(check, "boundaries", *boundaries, "[2^bits - 1]", Int((int64_t(1) << code.bits) - 1));
  }
};

// Encodes vectors: the code of a rotated coordinate is the index of its nearest centroid. A trellis code, which has no
// boundaries, is the one whose decoded vector is nearest. In place, codes go to slots.
template <typename Int>
struct AuraEncode : AuraEncoder<Int> {
  static constexpr const char* kSchema =
      "aura_encode(Tensor x, Tensor signs, Tensor? boundaries, Tensor codebook) -> (Tensor codes, Tensor norms)";

  auto arguments() { return std::tie(this->x, this->signs, this->boundaries, this->codebook); }

  void check(const char* op) { this->check_codec(Check<Int>(op, "x", this->x)); }

  std::tuple<Tensor, Tensor> outputs() const {
    const auto rows = sizes_without_last<Int>(this->x);
    const auto words = code_words(this->D, this->code.bits);
    const auto options = this->x.options();
    return {empty<Int>(with_last(rows, words), options.dtype(at::kInt)), empty<Int>(rows, options.dtype(at::kHalf))};
  }
};

// Skips tokens with a negative slot.
template <typename Int>
struct AuraEncodeInPlace : AuraEncoder<Int> {
  static constexpr const char* kSchema =
      "aura_encode_(Tensor x, Tensor slots, Tensor signs, Tensor? boundaries, Tensor codebook, Tensor(a!) codes, "
      "Tensor(b!) norms, Tensor? tile_means=None) -> ()";

  Tensor slots;
  EncodedVectors cache;
  optional<Tensor> tile_means;  // [B, HK, tiles, D], subtracted first

  auto arguments() {
    return std::tie(this->x, slots, this->signs, this->boundaries, this->codebook, cache.codes, cache.norms,
                    tile_means);
  }

  void check(const char* op) {
    const Check<Int> check(op, "x", this->x);
    check.dimensions("x", this->x, 4, "[B, HK, T, D]");
    this->check_codec(check);
    const auto B = size_of<Int>(this->x, 0), HK = size_of<Int>(this->x, 1), T = size_of<Int>(this->x, 2);
    check_index(check, "slots", slots);
    if (slots.dim() == 1) {
      check.shape("slots", slots, "[T]", {T});
    } else {
      check.shape("slots", slots, "[B, T] or [T]", {B, T});
    }
    const auto& [codes, norms] = cache;
    check.is_int32("codes", codes).dimensions(4, "[B, HK, S, ceil(D * bits / 32)]");
    const Sizes<Int> rows = {B, HK, size_of<Int>(codes, 2)};
    check_codes(check, "codes", codes, rows, this->D, this->code);
    const auto stride = codes.sym_stride(3);
    check.value(sym_eq(stride, c10::SymInt(1)), "codes", "a last stride of 1", stride);
    check_norms(check, "norms", norms, rows);
    if (tile_means.has_value()) check_tile_means(check, "tile_means", *tile_means, B, HK, rows[2], this->D);
    if constexpr (is_run<Int>) check_cpu_slots(check);
  }

  // If slots are on the device, the kernel checks them.
  void check_cpu_slots(const Check<Int>& check) const {
    if (!slots.is_cpu()) return;
    const int64_t S = cache.codes.size(2);
    for_each_index(slots, [&](int64_t slot, int64_t) {
      check.value(slot < S, "slots", "slots below the cache's size", slot, " for a size of ", S);
    });
  }

  void outputs() const {}
};

// Decodes codes to vectors, or to rotated vectors if `rotated`.
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
    check.value(codes.dim() >= 1, "codes", "at least one dimension", codes.dim());
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
