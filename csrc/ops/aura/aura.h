// What the AURA ops accept: attention over a KV cache that holds codes. As checks.h, which see for the messages.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "ops/check.h"

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

  void block_size(int64_t size) const { value(size >= 16 && size % 16 == 0, "block_size", "a multiple of 16", size); }

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
  const auto* first = static_cast<const Index*>(in_a_row.const_data_ptr());
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

// So many keys a block, in whole tiles, that there are about `wanted` work_items of work where `groups` stand side by side
// already.
inline int64_t default_block_size(int64_t T, int64_t tile, int64_t groups, int64_t wanted) {
  const int64_t tiles = std::max<int64_t>(1, ceil_div(T, tile));
  const int64_t blocks = std::clamp<int64_t>(wanted / std::max<int64_t>(1, groups), 1, tiles);
  return ceil_div(tiles, blocks) * tile;
}

// What pass 1 and the end-to-end op share: q [B, HQ, L, D], the cache, and who sees what.
inline AuraShape check_aura_queries(const AuraCheck& check, const char* q_name, const Tensor& q,
                                    const Tensor& key_codes, const Tensor& key_norms, const Tensor& key_codebook,
                                    const optional<Tensor>& key_means, const Tensor& value_codes,
                                    const Tensor& value_norms, const Tensor& value_codebook,
                                    const optional<Tensor>& value_means, const optional<Tensor>& starts, bool causal,
                                    optional<int64_t> q_offset, int64_t window) {
  check.dimensions(q_name, q, 4, "[B, HQ, L, D]");
  AuraShape s{.B = q.size(0), .HQ = q.size(1), .L = q.size(2), .D = check.head_size(q_name, q.size(3))};
  s.key_bits = check.bits("key_codebook", key_codebook);
  s.value_bits = check.bits("value_codebook", value_codebook);
  check.is_codes("key_codes", key_codes);
  check.dimensions("key_codes", key_codes, 4, "[B, HK, T, ceil(D * bits / 32)]");
  s.HK = key_codes.size(1), s.T = key_codes.size(2);
  check.heads("key_codes", s.HK, q_name, s.HQ);
  check.cache(s, "key_codes", key_codes, "key_norms", key_norms, "key_means", key_means, s.key_bits);
  check.cache(s, "value_codes", value_codes, "value_norms", value_norms, "value_means", value_means, s.value_bits);
  if (starts.has_value()) {
    check.is_index("starts", *starts);
    check.shape("starts", *starts, "[B]", {s.B});
  }
  s.q_offset = q_offset.value_or(s.T - s.L);
  const int64_t largest = INT32_MAX / 2;
  check.value(s.T <= largest, "key_codes", "fewer than 2^30 tokens", s.T);
  check.value(s.q_offset >= -largest && s.q_offset <= largest, "q_offset", "a position below 2^30", s.q_offset);
  check.value(window >= 0 && window <= largest, "window", "a window from 0 (none) to 2^30", window);
  check.value(window == 0 || causal, "window", "0 where causal is false", window);
  return s;
}

inline AuraShape check_aura_flash_p1(const Tensor& q_rot, const Tensor& key_codes, const Tensor& key_norms,
                                     const Tensor& key_codebook, const Tensor& value_codes, const Tensor& value_norms,
                                     const Tensor& value_codebook, const optional<Tensor>& key_means,
                                     const optional<Tensor>& q_sums, const optional<Tensor>& value_means,
                                     const optional<Tensor>& starts, bool causal, optional<int64_t> q_offset,
                                     int64_t window, int64_t block_size) {
  const AuraCheck check("aura_flash_p1", "q_rot", q_rot);
  check.is_f32("q_rot", q_rot);
  AuraShape s = check_aura_queries(check, "q_rot", q_rot, key_codes, key_norms, key_codebook, key_means, value_codes,
                                   value_norms, value_codebook, value_means, starts, causal, q_offset, window);
  check.value(q_sums.has_value() == key_means.has_value(), "q_sums", "a tensor where key_means is one, else None",
              q_sums.has_value() ? "a tensor" : "None");
  if (q_sums.has_value()) {
    check.is_f32("q_sums", *q_sums);
    check.shape("q_sums", *q_sums, "[B, HQ, L]", {s.B, s.HQ, s.L});
  }
  check.block_size(block_size);
  s.block_size = block_size;
  s.NB = ceil_div(s.T, block_size);
  return s;
}

inline AuraShape check_aura_flash_p2(const Tensor& o_partials, const Tensor& m_partials, const Tensor& l_partials,
                                     const Tensor& value_signs, const optional<Tensor>& mean_partials,
                                     const optional<Tensor>& sinks, optional<at::ScalarType> dtype) {
  const AuraCheck check("aura_flash_p2", "o_partials", o_partials);
  check.is_f32("o_partials", o_partials);
  check.dimensions("o_partials", o_partials, 5, "[B, HQ, L, NB, D]");
  AuraShape s{.B = o_partials.size(0), .HQ = o_partials.size(1), .L = o_partials.size(2)};
  s.NB = o_partials.size(3);
  s.D = check.head_size("o_partials", o_partials.size(4));
  check.is_f32("m_partials", m_partials);
  check.shape("m_partials", m_partials, "[B, HQ, L, NB]", {s.B, s.HQ, s.L, s.NB});
  check.is_f32("l_partials", l_partials);
  check.shape("l_partials", l_partials, "[B, HQ, L, NB]", {s.B, s.HQ, s.L, s.NB});
  check.table("value_signs", value_signs, "[D]", s.D);
  if (mean_partials.has_value()) {
    check.is_f32("mean_partials", *mean_partials);
    check.shape("mean_partials", *mean_partials, "[B, HQ, L, NB]", {s.B, s.HQ, s.L, s.NB});
  }
  if (sinks.has_value()) check.table("sinks", *sinks, "[HQ]", s.HQ);
  check.result_dtype(dtype);
  return s;
}

inline AuraShape check_aura_attention(const Tensor& q, const Tensor& key_codes, const Tensor& key_norms,
                                      const Tensor& key_codebook, const Tensor& key_signs, const Tensor& value_codes,
                                      const Tensor& value_norms, const Tensor& value_codebook,
                                      const Tensor& value_signs, const optional<Tensor>& key_means,
                                      const optional<Tensor>& value_means, const optional<Tensor>& starts,
                                      const optional<Tensor>& sinks, bool causal, optional<int64_t> q_offset,
                                      int64_t window, optional<int64_t> block_size) {
  const AuraCheck check("aura_attention", "q", q);
  check.is_activation("q", q);
  AuraShape s = check_aura_queries(check, "q", q, key_codes, key_norms, key_codebook, key_means, value_codes,
                                   value_norms, value_codebook, value_means, starts, causal, q_offset, window);
  check.table("key_signs", key_signs, "[D]", s.D);
  check.table("value_signs", value_signs, "[D]", s.D);
  if (sinks.has_value()) check.table("sinks", *sinks, "[HQ]", s.HQ);
  if (block_size.has_value()) check.block_size(*block_size);
  return s;
}

}  // namespace torch_gdn
