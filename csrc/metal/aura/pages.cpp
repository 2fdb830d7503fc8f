// The ops on pages that hold codes.
#include "shaders/aura/pages.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "metal/attention/paged_attention.h"
#include "metal/aura/vectors.h"
#include "metal/implement.h"
#include "ops/aura/pages.h"

namespace torch_gdn {

namespace {

// Rotates `in` to `out`, both [T, H, D]. Padding is left alone.
Launch launch_paged_rotate(const PagedCall& call, const Tensor& in, const Tensor& signs, const Tensor& out,
                           bool inverse) {
  const auto& s = call.shape;
  const int32_t vectors = int32_count(s.T * s.HQ, "aura_paged_attention_: q", "vectors");
  const PagedRotateParameters parameters{token_strides(in),
                                         token_strides(out),
                                         call.parameters.boundary,
                                         call.parameters.boundary_bytes,
                                         int32_t(s.N),
                                         vectors,
                                         int32_t(s.T),
                                         int32_t(s.HQ)};
  return {"aura/paged_rotate",
          {in.scalar_type(), out.scalar_type(), call.head_size(), inverse},
          {in, signs.contiguous(), call.cu_seqlens, out, parameters},
          {rotation_groups(vectors, s.D), 1, 1},
          kAuraThreads};
}

ExactRowsParameters exact_parameters(const PagedExactRows<int64_t>& exact, const Tensor& slots, const Tensor& starts,
                                     const Tensor& sink_slots) {
  return {page_strides(*exact.keys),
          page_strides(*exact.values),
          token_strides(*exact.new_keys),
          token_strides(*exact.new_values),
          slots.stride(0),
          starts.stride(0),
          sink_slots.stride(0),
          int32_t(slots.element_size()),
          int32_t(starts.element_size()),
          int32_t(sink_slots.element_size()),
          int32_t(std::min<int64_t>(exact.keys->size(0), INT32_MAX)),
          int32_t(exact.keys->size(1) - exact.sinks),
          int32_t(exact.sinks),
          int32_t(exact.tail)};
}

Launch launch_aura_paged_attention(const AuraPagedAttention<int64_t>& op, const PagedCall& call) {
  const auto& exact = op.exact;
  const auto slots = index_array(op.q.device(), exact.slots), starts = index_array(op.q.device(), exact.starts);
  const auto sink_slots = index_array(op.q.device(), exact.sink_slots);
  const auto& means = op.key.tile_means;
  AuraPagedParameters parameters{};
  parameters.paged = call.parameters;
  parameters.key_norms = page_strides(op.key.norms);
  parameters.value_norms = page_strides(op.value.norms);
  if (means.has_value()) parameters.key_tile_means = page_strides(*means);
  parameters.has_tile_means = means.has_value() ? 1 : 0;
  const int64_t rows = call.plan.rows, simdgroups = simdgroups_of(int(rows), int(call.head_size()));
  TemplateArguments arguments = {number_of(op.key_code), number_of(op.value_code), call.head_size(), rows};
  if (exact.present()) {
    parameters.exact = exact_parameters(exact, *slots, *starts, *sink_slots);
    arguments[4] = exact.keys->scalar_type();
    arguments[5] = true;
  }
  return {"aura/aura_paged_attention",
          arguments,
          {call.q,
           op.key.codes,
           op.key.norms,
           op.key.codebook.contiguous(),
           op.value.codes,
           op.value.norms,
           op.value.codebook.contiguous(),
           call.block_table,
           call.cu_seqlens,
           call.seq_lens,
           call.sinks,
           call.out,
           call.o_partials,
           call.m_partials,
           call.l_partials,
           Binding::error_log(),
           parameters,
           exact.keys,
           exact.values,
           slots,
           starts,
           sink_slots,
           exact.new_keys,
           exact.new_values,
           exact.present() || means.has_value() ? op.key_signs.contiguous() : Tensor(),
           exact.present() ? op.value_signs.contiguous() : Tensor(),
           means},
          {call.plan.tiles, op.shape.HK, call.plan.splits},
          simdgroups * 32};
}

void run(const AuraPagedAttention<int64_t>& op) {
  const auto& s = op.shape;
  if (s.T == 0 || s.N == 0) return;
  const Tensor q = unit_last_stride(op.q, "q");
  const auto f32 = q.options().dtype(at::kFloat);
  const Tensor q_rot = at::empty({s.T, s.HQ, s.D}, f32);
  const Tensor o_rot = at::zeros({s.T, s.HQ, s.D}, f32);  // what wrong boundaries leave out is not memory of others
  const auto call = paged_call("aura_paged_attention_", s, op.sequences, q_rot, o_rot, op.key.codes, op.value.codes,
                               {op.scale, op.sinks});
  std::vector<Launch> launches = {launch_paged_rotate(call, q, op.key_signs, q_rot, false),
                                  launch_aura_paged_attention(op, call)};
  if (call.plan.splits > 1) launches.push_back(launch_paged_attention_merge(call));
  launches.push_back(launch_paged_rotate(call, o_rot, op.value_signs, op.out, true));
  launcher().run(launches);
}

void run(const AuraPagedTileMeans<int64_t>& op) {
  const auto& s = op.shape;
  const int64_t channels = s.HK * s.D;
  // Without new tokens, the kernel still checks the sequences.
  const int64_t tiles = std::max<int64_t>(1, ceil_div(std::min(op.sequences.max_query_len, s.T), kTokensOfTile));
  if (s.N == 0 || channels == 0 || s.blocks == 0) return;
  const auto device = op.keys.device();
  const Tensor block_table = index_array(device, op.sequences.block_table);
  const Tensor cu_seqlens = index_array(device, op.sequences.cu_seqlens);
  const Tensor seq_lens = index_array(device, op.sequences.seq_lens);
  const Tensor slots = index_array(device, op.exact_slots), starts = index_array(device, op.exact_starts);
  int32_count(s.T, "aura_paged_tile_means_: keys", "tokens");
  int32_count(s.N, "aura_paged_tile_means_: seq_lens", "sequences");
  int32_count(s.table_blocks, "aura_paged_tile_means_: block_table", "blocks");
  PagedTileMeansParameters parameters{};
  set_sequences(parameters.paged, s, op.sequences, block_table, cu_seqlens, seq_lens);
  parameters.keys = token_strides(op.keys);
  parameters.tile_means = page_strides(op.tile_means);
  parameters.exact_keys = page_strides(op.exact_keys);
  parameters.slot = slots.stride(0);
  parameters.start = starts.stride(0);
  parameters.slot_bytes = int32_t(slots.element_size());
  parameters.start_bytes = int32_t(starts.element_size());
  parameters.slots = int32_t(std::min<int64_t>(op.exact_keys.size(0), INT32_MAX));
  parameters.ring = int32_t(op.exact_keys.size(1) - op.sinks);
  parameters.sinks = int32_t(op.sinks);
  parameters.tail = int32_t(op.tail);
  parameters.head_size = int32_t(s.D);
  int32_count(channels, "aura_paged_tile_means_: keys", "elements of a token");
  launcher().run({{"aura/aura_paged_tile_means",
                   {op.keys.scalar_type()},
                   {op.keys, op.exact_keys, slots, starts, block_table, cu_seqlens, seq_lens, op.tile_means,
                    Binding::error_log(), parameters},
                   {s.N, ceil_div(channels, kMeanThreads), tiles},
                   kMeanThreads}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<AuraPagedAttention, &run>(m);
  metal::implement<AuraPagedTileMeans, &run>(m);
}

}  // namespace torch_gdn
