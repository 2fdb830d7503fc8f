// Attention to pages that hold AURA's codes, and to exact rows: rotates q, attends, and rotates the result back.
#pragma once
#include "ops/aura/aura.h"
#include "ops/aura/ring_buffer.h"
#include "ops/aura/tile_means.h"

namespace torch_gdn {

template <typename Int>
struct AuraPagedAttention {
  static constexpr const char* kSchema =
      "aura_paged_attention_(Tensor(a!) out, Tensor q, Tensor key_codes, Tensor key_norms, Tensor key_codebook, "
      "Tensor key_signs, Tensor value_codes, Tensor value_norms, Tensor value_codebook, Tensor value_signs, "
      "Tensor block_table, Tensor cu_seqlens, Tensor seq_lens, *, SymInt max_query_len, SymInt max_seq_len, "
      "float? scale=None, bool causal=True, int window=0, Tensor? sinks=None, Tensor? exact_keys=None, "
      "Tensor? exact_values=None, Tensor? exact_slots=None, Tensor? exact_starts=None, Tensor? exact_sink_slots=None, "
      "Tensor? new_keys=None, Tensor? new_values=None, SymInt exact_sinks=0, SymInt tail=0, "
      "Tensor? key_tile_means=None) -> ()";

  // Codes [blocks, block_size, HK, words], norms [blocks, block_size, HK], and means of keys as check_means_of_pages
  // has them.
  Tensor out, q;
  CodedTensor key, value;
  Tensor key_signs, value_signs;
  PagedSequences<Int> sequences;
  optional<double> scale;
  optional<Tensor> sinks;
  PagedExactRows<Int> exact;

  PagedShape<Int> shape;
  Code key_code, value_code;

  auto arguments() {
    auto& [block_table, cu_seqlens, seq_lens, max_query_len, max_seq_len, causal, window] = sequences;
    return std::tie(out, q, key.codes, key.norms, key.codebook, key_signs, value.codes, value.norms, value.codebook,
                    value_signs, block_table, cu_seqlens, seq_lens, max_query_len, max_seq_len, scale, causal, window,
                    sinks, exact.keys, exact.values, exact.slots, exact.starts, exact.sink_slots, exact.new_keys,
                    exact.new_values, exact.sinks, exact.tail, key.tile_means);
  }

  void check(const char* op) {
    const Check<Int> check(op, "q", q);
    check_queries(check, shape, out, q);
    auto& s = shape;
    check_head_size(check, "q", s.D);
    check.is_int32("key_codes", key.codes).dimensions(4, "[blocks, block_size, HK, ceil(D * bits / 32)]");
    check_blocks(check, shape, "key_codes", key.codes);
    key_code = check_coded(check, "key_codes", "key_norms", "key_codebook", "key_signs", key, key_signs);
    value_code = check_coded(check, "value_codes", "value_norms", "value_codebook", "value_signs", value, value_signs);
    check_sequences_of_pages(check, s, sequences);
    check_sinks(check, s, sinks);
    if constexpr (is_run<Int>) check_pages(check.op(), s, sequences);
    check_exact_rows(check, s, q, sequences.cu_seqlens, exact);
    if (key.tile_means.has_value()) check_means_of_pages(check, s, "key_tile_means", *key.tile_means);
  }

  void outputs() const {}

 private:
  Code check_coded(const Check<Int>& check, const char* codes_name, const char* norms_name, const char* codebook_name,
                   const char* signs_name, const CodedTensor& coded, const Tensor& signs) const {
    const Sizes<Int> rows = {shape.blocks, shape.block_size, shape.HK};
    const Code code = check_codebook(check, codebook_name, coded.codebook);
    check_codes(check, codes_name, coded.codes, rows, shape.D, code);
    check_unit_stride(check, codes_name, coded.codes);
    check_norms(check, norms_name, coded.norms, rows);
    check_table(check, signs_name, signs, "[D]", shape.D);
    return code;
  }
};

}  // namespace torch_gdn
