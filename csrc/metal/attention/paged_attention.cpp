#include "ops/attention/paged_attention.h"

#include "metal/attention/pages.h"
#include "metal/implement.h"
#include "shaders/attention/paged_attention_decode.h"
#include "shaders/attention/paged_attention_prefill.h"

namespace torch_gdn {

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
