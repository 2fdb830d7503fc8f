// Encodes vectors: the code of a rotated coordinate is the index of its nearest centroid. A trellis code, which has no
// boundaries, is the one whose decoded vector is nearest. In place, codes go to slots.
#pragma once
#include "ops/aura/aura.h"
#include "ops/indices.h"

namespace torch_gdn {

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
    check.is_activation("x", x);
    check.at_least_one_dimension("x", x);
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

}  // namespace torch_gdn
