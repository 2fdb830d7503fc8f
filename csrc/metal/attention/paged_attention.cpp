#include "metal/attention/paged_attention.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "metal/implement.h"
#include "ops/attention/paged_attention.h"
#include "shaders/attention/paged_attention.h"

namespace torch_gdn {

namespace {

// A split writes and reads 8 bytes of partials per element of o, and a key takes at least 4 bytes. With this many keys
// per row, the partials are 1/32 of the bytes that are read.
constexpr int64_t kKeysOfRow = 64, kMostRounds = 8;
constexpr int64_t kFewRows = 16, kManyRows = 64;  // rows per tile of the prefill kernel

PagedParameters parameters_of(const PagedCall& call, const PagedSequences<int64_t>& sequences, const Tensor& keys,
                              const Tensor& values, const PagedOptions& options) {
  const auto& s = call.shape;
  PagedParameters parameters{};
  parameters.key = page_strides(keys);
  parameters.value = page_strides(values);
  parameters.q = token_strides(call.q);
  parameters.out = token_strides(call.out);
  set_sequences(parameters, s, sequences, call.block_table, call.cu_seqlens, call.seq_lens);
  parameters.causal = sequences.causal ? 1 : 0;
  parameters.window = int32_t(sequences.window);
  parameters.rows = int32_t(call.plan.rows);
  parameters.splits = int32_t(call.plan.splits);
  parameters.least_keys = int32_t(call.plan.least_keys);
  parameters.has_sinks = options.sinks.has_value() ? 1 : 0;
  parameters.has_vectors = vector_width({keys, values}) == 4 ? 1 : 0;
  parameters.scale = float(scale_or_default(options.scale, s.D));
  return parameters;
}

Plan plan_of(const PagedShape<>& s, const PagedSequences<int64_t>& sequences) {
  const int64_t ratio = s.HQ / s.HK;
  const int64_t rows_of_sequence = std::max<int64_t>(1, std::min(sequences.max_query_len, s.T)) * ratio;
  Plan plan{};
  plan.rows = rows_of_sequence <= kDecodeRows ? kDecodeRows : rows_of_sequence <= kFewRows ? kFewRows : kManyRows;
  plan.tiles = std::min(ceil_div(s.T * ratio, plan.rows) + s.N, s.N * ceil_div(rows_of_sequence, plan.rows));
  const int64_t rounds = ceil_div(kKeysOfRow * std::min(rows_of_sequence, plan.rows), kKeysOfRound);
  plan.least_keys = std::min(rounds, kMostRounds) * kKeysOfRound;
  const int64_t most = ceil_div(std::min(sequences.max_seq_len, s.table_blocks * s.block_size), plan.least_keys);
  plan.splits = std::clamp<int64_t>(busy_threadgroups() / (s.N * s.HK), 1, std::max<int64_t>(1, most));
  return plan;
}

}  // namespace

void set_sequences(PagedParameters& parameters, const PagedShape<>& s, const PagedSequences<int64_t>& sequences,
                   const Tensor& block_table, const Tensor& cu_seqlens, const Tensor& seq_lens) {
  parameters.table_sequence = block_table.stride(0);
  parameters.table_block = block_table.stride(1);
  parameters.boundary = cu_seqlens.stride(0);
  parameters.length = seq_lens.stride(0);
  parameters.table_bytes = int32_t(block_table.element_size());
  parameters.boundary_bytes = int32_t(cu_seqlens.element_size());
  parameters.length_bytes = int32_t(seq_lens.element_size());
  parameters.sequences = int32_t(s.N);
  parameters.tokens = int32_t(s.T);
  parameters.kv_heads = int32_t(s.HK);
  parameters.ratio = int32_t(s.HQ / s.HK);
  parameters.query_rows = int32_t(s.T * (s.HQ / s.HK));
  parameters.blocks = int32_t(std::min<int64_t>(s.blocks, INT32_MAX));
  parameters.block_size = int32_t(s.block_size);
  parameters.table_blocks = s.blocks == 0 ? 0 : int32_t(s.table_blocks);  // without blocks, keys are reported, not read
  parameters.max_query_len = int32_t(sequences.max_query_len);
  parameters.max_seq_len = int32_t(sequences.max_seq_len);
  parameters.op = op_name();
}

PagedCall paged_call(const char* op, const PagedShape<>& s, const PagedSequences<int64_t>& sequences, const Tensor& q,
                     const Tensor& out, const Tensor& keys, const Tensor& values, const PagedOptions& options) {
  TORCH_CHECK_VALUE(s.T * (s.HQ / s.HK) <= kMostKeys && s.N <= kMostKeys && s.table_blocks <= INT32_MAX, op,
                    ": q: expected fewer than 2^30 query rows of a KV head (T * HQ / HK), got ", s.T * (s.HQ / s.HK));
  const auto device = q.device();
  const auto f32 = q.options().dtype(at::kFloat);
  const Plan plan = plan_of(s, sequences);
  PagedCall call{.shape = s,
                 .plan = plan,
                 .q = vector_width({q}) == 4 ? q : q.clone(at::MemoryFormat::Contiguous),
                 .out = out,
                 .block_table = index_array(device, sequences.block_table),
                 .cu_seqlens = index_array(device, sequences.cu_seqlens),
                 .seq_lens = index_array(device, sequences.seq_lens),
                 .sinks = contiguous(options.sinks),
                 .o_partials = {},
                 .m_partials = {},
                 .l_partials = {},
                 .parameters = {}};
  if (plan.splits > 1) {
    const int64_t rows = s.N * s.HK * plan.rows * plan.splits;
    call.o_partials = at::empty({rows * s.D}, f32);
    call.m_partials = at::empty({rows}, f32);
    call.l_partials = at::empty({rows}, f32);
  }
  call.parameters = parameters_of(call, sequences, keys, values, options);
  return call;
}

Launch launch_paged_attention_merge(const PagedCall& call) {
  return {"attention/paged_attention_merge",
          {call.q_type(), call.head_size()},
          {call.o_partials, call.m_partials, call.l_partials, call.cu_seqlens, call.seq_lens, call.sinks, call.out,
           call.parameters},
          {ceil_div(call.plan.rows, kMergeRows), call.shape.HK, call.shape.N},
          kMergeRows * 32};
}

namespace {

Launch launch_attention(const PagedAttention<int64_t>& op, const PagedCall& call) {
  const auto& plan = call.plan;
  const auto heads = op.shape.HK, sequences = op.shape.N, splits = plan.splits;
  const int64_t simdgroups = plan.is_decode() ? kDecodeSimdgroups : plan.rows / kPrefillRows;
  TemplateArguments arguments = {call.q_type(), op.key_cache.scalar_type(), call.head_size()};
  if (!plan.is_decode()) arguments[3] = simdgroups;
  Launch launch{plan.is_decode() ? "attention/paged_attention_decode" : "attention/paged_attention_prefill",
                arguments,
                {call.q, op.key_cache, op.value_cache, call.block_table, call.cu_seqlens, call.seq_lens, call.sinks,
                 call.out, call.o_partials, call.m_partials, call.l_partials, Binding::error_log(), call.parameters},
                {splits, heads, sequences},
                simdgroups * 32};
  if (!plan.is_decode()) launch.threadgroups = {plan.tiles, heads, splits};
  return launch;
}

void run(const PagedAttention<int64_t>& op) {
  if (op.shape.T == 0 || op.shape.N == 0) return;
  const auto call = paged_call("paged_attention_", op.shape, op.sequences, unit_last_stride(op.q, "q"), op.out,
                               op.key_cache, op.value_cache, {op.scale, op.sinks});
  std::vector<Launch> launches = {launch_attention(op, call)};
  if (call.plan.splits > 1) launches.push_back(launch_paged_attention_merge(call));
  launcher().run(launches);
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<PagedAttention, &run>(m); }

}  // namespace torch_gdn
