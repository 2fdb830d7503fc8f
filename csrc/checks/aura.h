// What the AURA ops accept: attention over a KV cache that holds codes. As checks.h, which see for the messages.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "../checks.h"

namespace torch_gdn {

struct AuraShape {
  int64_t B = 0, HQ = 0, HK = 0, L = 0, T = 0, D = 0;  // what an op does not have stays 0
  int64_t S = 0;                                       // slots of the cache that is written
  int64_t key_bits = 0, value_bits = 0;                // the codec's bits are key_bits
  int64_t q_offset = 0;                                // position of the first query
  int64_t block_size = 0, NB = 0;                      // keys of a block, blocks
};

constexpr const char* kHeadSizes = "a head size of 64, 80, 96, 128, 256 or 512";

inline bool is_head_size(int64_t D) { return D == 64 || D == 80 || D == 96 || D == 128 || D == 256 || D == 512; }

inline int64_t code_words(int64_t D, int64_t bits) { return ceil_div(D * bits, 32); }

// The checks of one call of an AURA op.
class AuraCheck : public Check {
 public:
  using Check::Check;

  int64_t head_size(const char* argument, int64_t D) const {
    value(is_head_size(D), argument, kHeadSizes, D);
    return D;
  }

  // Every vector of a table: f32, one dimension.
  void table(const char* argument, const Tensor& x, const char* pattern, int64_t size) const {
    is_f32(argument, x);
    shape(argument, x, pattern, {size});
  }

  int64_t bits(const char* argument, const Tensor& codebook) const {
    is_f32(argument, codebook);
    dimensions(argument, codebook, 1, "[2^bits]");
    for (const int64_t bits : {2, 3, 4, 8}) {
      if (codebook.size(0) == int64_t(1) << bits) return bits;
    }
    value(false, argument, "4, 8, 16 or 256 centroids (2, 3, 4 or 8 bits)", codebook.size(0));
    return 0;
  }

  void is_codes(const char* argument, const Tensor& x) const {
    TORCH_CHECK_TYPE(x.scalar_type() == at::kInt, op(), ": ", argument, ": expected dtype Int, got ", x.scalar_type());
  }

  void is_index(const char* argument, const Tensor& x) const {
    TORCH_CHECK_TYPE(x.scalar_type() == at::kInt || x.scalar_type() == at::kLong, op(), ": ", argument,
                     ": expected dtype Int or Long, got ", x.scalar_type());
    on_device(argument, x);
  }

  // [rows.., words] of a codec with so many bits, where rows are those of another tensor.
  void codes_like(const char* argument, const Tensor& codes, at::IntArrayRef rows, int64_t D, int64_t bits) const {
    is_codes(argument, codes);
    std::vector<int64_t> sizes = rows.vec();
    sizes.push_back(code_words(D, bits));
    sized(argument, codes, "[.., ceil(D * bits / 32)]", sizes);
  }

  void norms_like(const char* argument, const Tensor& norms, at::IntArrayRef rows) const {
    is_f32(argument, norms);
    sized(argument, norms, "that of the codes without their words", rows);
  }

  void result_dtype(optional<at::ScalarType> dtype) const {
    TORCH_CHECK_TYPE(!dtype.has_value() || *dtype == at::kFloat || *dtype == at::kBFloat16 || *dtype == at::kHalf, op(),
                     ": dtype: expected dtype BFloat16, Half or Float, got ", *dtype);
  }

  // Keys or values of a cache: codes [B, HK, T, words], norms [B, HK, T], means [B, HK, T].
  void cache(const AuraShape& s, const char* codes_name, const Tensor& codes, const char* norms_name,
             const Tensor& norms, const char* means_name, const optional<Tensor>& means, int64_t bits) const {
    const std::vector<int64_t> rows = {s.B, s.HK, s.T};
    codes_like(codes_name, codes, rows, s.D, bits);
    norms_like(norms_name, norms, rows);
    if (means.has_value()) norms_like(means_name, *means, rows);
  }

 private:
  void sized(const char* argument, const Tensor& x, const char* pattern, at::IntArrayRef sizes) const {
    TORCH_CHECK_VALUE(x.sizes() == sizes, op(), ": ", argument, ": expected shape ", pattern, " = ", sizes, ", got ",
                      x.sizes());
    on_device(argument, x);
  }
};

inline AuraShape check_aura_codec(const AuraCheck& check, const Tensor& x, const Tensor& signs,
                                  const Tensor& boundaries, const Tensor& codebook) {
  check.is_activation("x", x);
  check.value(x.dim() >= 1, "x", "at least one dimension", x.dim());
  AuraShape s{.D = check.head_size("x", x.size(-1))};
  check.table("signs", signs, "[D]", s.D);
  s.key_bits = check.bits("codebook", codebook);
  check.table("boundaries", boundaries, "[2^bits - 1]", codebook.size(0) - 1);
  return s;
}

inline AuraShape check_aura_encode(const Tensor& x, const Tensor& signs, const Tensor& boundaries,
                                   const Tensor& codebook, bool /*with_means*/) {
  return check_aura_codec(AuraCheck("aura_encode", "x", x), x, signs, boundaries, codebook);
}

// Slots on the CPU are looked at; those of a device the kernel looks at.
template <typename Index>
void check_slot_values(const AuraCheck& check, const Tensor& slots, int64_t S) {
  const Tensor in_a_row = slots.contiguous();
  const Index* first = in_a_row.const_data_ptr<Index>();
  for (int64_t i = 0; i < in_a_row.numel(); ++i) {
    check.value(first[i] < S, "slots", "slots below the cache's size", first[i], " for a size of ", S);
  }
}

inline AuraShape check_aura_encode_(const Tensor& x, const Tensor& slots, const Tensor& signs, const Tensor& boundaries,
                                    const Tensor& codebook, const Tensor& codes, const Tensor& norms,
                                    const optional<Tensor>& means) {
  const AuraCheck check("aura_encode_", "x", x);
  check.is_activation("x", x);
  check.dimensions("x", x, 4, "[B, HK, T, D]");
  AuraShape s = check_aura_codec(check, x, signs, boundaries, codebook);
  s.B = x.size(0), s.HK = x.size(1), s.T = x.size(2);
  check.is_index("slots", slots);
  if (slots.dim() == 1) {
    check.shape("slots", slots, "[T]", {s.T});
  } else {
    check.shape("slots", slots, "[B, T] or [T]", {s.B, s.T});
  }
  check.is_codes("codes", codes);
  check.dimensions("codes", codes, 4, "[B, HK, S, ceil(D * bits / 32)]");
  s.S = codes.size(2);
  const std::vector<int64_t> rows = {s.B, s.HK, s.S};
  check.codes_like("codes", codes, rows, s.D, s.key_bits);
  check.value(codes.stride(3) == 1, "codes", "a last stride of 1", codes.stride(3));
  check.norms_like("norms", norms, rows);
  if (means.has_value()) check.norms_like("means", *means, rows);
  if (slots.is_cpu() && slots.scalar_type() == at::kInt) check_slot_values<int32_t>(check, slots, s.S);
  if (slots.is_cpu() && slots.scalar_type() == at::kLong) check_slot_values<int64_t>(check, slots, s.S);
  return s;
}

inline AuraShape check_aura_decode(const Tensor& codes, const Tensor& norms, const Tensor& codebook,
                                   const Tensor& signs, const optional<Tensor>& means, bool /*rotated*/,
                                   optional<at::ScalarType> dtype) {
  const AuraCheck check("aura_decode", "codes", codes);
  check.is_codes("codes", codes);
  check.value(codes.dim() >= 1, "codes", "at least one dimension", codes.dim());
  check.is_f32("signs", signs);
  check.dimensions("signs", signs, 1, "[D]");
  AuraShape s{.D = check.head_size("signs", signs.size(0))};
  s.key_bits = check.bits("codebook", codebook);
  const auto rows = codes.sizes().slice(0, codes.dim() - 1);
  check.codes_like("codes", codes, rows, s.D, s.key_bits);
  check.norms_like("norms", norms, rows);
  if (means.has_value()) check.norms_like("means", *means, rows);
  check.result_dtype(dtype);
  return s;
}

inline AuraShape check_aura_rotate(const Tensor& x, const Tensor& signs, double /*scale*/, bool /*inverse*/) {
  const AuraCheck check("aura_rotate", "x", x);
  check.is_activation("x", x);
  check.value(x.dim() >= 1, "x", "at least one dimension", x.dim());
  AuraShape s{.D = check.head_size("x", x.size(-1))};
  check.table("signs", signs, "[D]", s.D);
  return s;
}

}  // namespace torch_gdn
