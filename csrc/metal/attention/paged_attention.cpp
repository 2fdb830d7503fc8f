#include "ops/attention/paged_attention.h"

#include <algorithm>

#include "metal/attention/pages.h"
#include "metal/implement.h"
#include "shaders/attention/paged_attention_decode.h"
#include "shaders/attention/paged_attention_merge.h"
#include "shaders/attention/paged_attention_prefill.h"

namespace torch_gdn {

namespace {

constexpr int64_t kThreadgroups = 256;  // wanted where keys are divided: 3 or more a GPU core
// A split writes and reads 8 bytes of partials for each element of o, and a key has at least 4 bytes: with so many keys
// a row partials are 1/32 of what is read.
constexpr int64_t kKeysOfRow = 64, kMostRounds = 8;
constexpr int64_t kFewRows = 16, kManyRows = 64;  // of a tile of the prefill kernel

// How the rows of all sequences are shared out; from bounds alone, since what the tensors hold is on the device.
struct Plan {
  int64_t rows;    // of a tile
  int64_t tiles;   // of a KV head, at most
  int64_t splits;  // of the keys, at most
  int64_t least_keys;
  bool is_decode;
};

Plan plan_of(const PagedAttention<int64_t>& op) {
  const auto& s = op.shape;
  const int64_t ratio = s.HQ / s.HK;
  const int64_t rows_of_sequence = std::max<int64_t>(1, std::min(op.sequences.max_query_len, s.T)) * ratio;
  Plan plan{};
  plan.is_decode = rows_of_sequence <= kDecodeRows;
  plan.rows = plan.is_decode ? kDecodeRows : rows_of_sequence <= kFewRows ? kFewRows : kManyRows;
  plan.tiles = std::min(ceil_div(s.T * ratio, plan.rows) + s.N, s.N * ceil_div(rows_of_sequence, plan.rows));
  const int64_t rounds = ceil_div(kKeysOfRow * std::min(rows_of_sequence, plan.rows), kKeysOfRound);
  plan.least_keys = std::min(rounds, kMostRounds) * kKeysOfRound;
  const int64_t most = ceil_div(std::min(op.sequences.max_seq_len, s.table_blocks * s.block_size), plan.least_keys);
  plan.splits = std::clamp<int64_t>(kThreadgroups / (s.N * s.HK), 1, std::max<int64_t>(1, most));
  return plan;
}

// On the device.
struct IndexTensors {
  Tensor block_table, cu_seqlens, seq_lens;
};

PagedParameters parameters_of(const PagedAttention<int64_t>& op, const Tensor& q, const IndexTensors& tensors,
                              const Plan& plan) {
  const auto& s = op.shape;
  const auto& [block_table, cu_seqlens, seq_lens, max_query_len, max_seq_len, causal, window] = op.sequences;
  PagedParameters parameters{};
  parameters.key = page_strides(op.key_cache);
  parameters.value = page_strides(op.value_cache);
  parameters.q = token_strides(q);
  parameters.out = token_strides(op.out);
  parameters.table_sequence = tensors.block_table.stride(0);
  parameters.table_block = tensors.block_table.stride(1);
  parameters.boundary = tensors.cu_seqlens.stride(0);
  parameters.length = tensors.seq_lens.stride(0);
  parameters.sequences = int32_t(s.N);
  parameters.tokens = int32_t(s.T);
  parameters.kv_heads = int32_t(s.HK);
  parameters.ratio = int32_t(s.HQ / s.HK);
  parameters.query_rows = int32_t(s.T * (s.HQ / s.HK));
  parameters.blocks = int32_t(std::min<int64_t>(s.blocks, INT32_MAX));
  parameters.block_size = int32_t(s.block_size);
  parameters.table_blocks = s.blocks == 0 ? 0 : int32_t(s.table_blocks);  // then every key is reported, and none read
  parameters.max_query_len = int32_t(max_query_len);
  parameters.max_seq_len = int32_t(max_seq_len);
  parameters.causal = causal ? 1 : 0;
  parameters.window = int32_t(window);
  parameters.rows = int32_t(plan.rows);
  parameters.splits = int32_t(plan.splits);
  parameters.least_keys = int32_t(plan.least_keys);
  parameters.has_sinks = op.sinks.has_value() ? 1 : 0;
  parameters.has_vectors = vector_width({op.key_cache, op.value_cache}) == "4" ? 1 : 0;
  parameters.scale = float(scale_or_default(op.scale, s.D));
  return parameters;
}

// o [N, HK, rows, splits, D], m and l [N, HK, rows, splits]; without splits of a single element.
struct SplitPartials {
  Tensor o, m, l;
};

SplitPartials partials_of(const PagedShape<>& s, const Plan& plan, const at::TensorOptions& options) {
  const int64_t rows = plan.splits > 1 ? s.N * s.HK * plan.rows * plan.splits : 1;
  const auto f32 = options.dtype(at::kFloat);
  return {at::empty({plan.splits > 1 ? rows * s.D : 1}, f32), at::empty({rows}, f32), at::empty({rows}, f32)};
}

struct Call {
  const PagedAttention<int64_t>& op;
  Plan plan;
  Tensor q;
  IndexTensors tensors;
  SplitPartials partials;
  Tensor sinks;
  PagedParameters parameters;

  std::string q_type() const { return metal_type(q.scalar_type()); }
  std::string head_size() const { return std::to_string(op.shape.D); }
  // Metal has no buffer for a tensor without elements.
  Tensor bound(const Tensor& x) const { return x.numel() > 0 ? x : or_dummy(std::nullopt, q); }
};

Call call_of(const PagedAttention<int64_t>& op) {
  const Tensor q = unit_last_stride(op.q, "q");
  const auto device = q.device();
  const Plan plan = plan_of(op);
  const IndexTensors tensors{op.sequences.block_table.to(device), op.sequences.cu_seqlens.to(device),
                             op.sequences.seq_lens.to(device)};
  const auto partials = partials_of(op.shape, plan, q.options());
  return {.op = op,
          .plan = plan,
          .q = q,
          .tensors = tensors,
          .partials = partials,
          .sinks = op.sinks.has_value() ? op.sinks->contiguous() : partials.m,
          .parameters = parameters_of(op, q, tensors, plan)};
}

Launch launch_attention(const Call& call) {
  const auto& [op, plan, q, tensors, partials, sinks, parameters] = call;
  const auto heads = size_t(op.shape.HK), sequences = size_t(op.shape.N), splits = size_t(plan.splits);
  const int64_t simdgroups = plan.is_decode ? kDecodeSimdgroups : plan.rows / kPrefillRows;
  const std::string kernel = plan.is_decode ? "paged_attention_decode" : "paged_attention_prefill";
  std::vector<std::string> arguments = {call.q_type(), metal_type(op.key_cache.scalar_type()), call.head_size()};
  if (!plan.is_decode) arguments.push_back(std::to_string(simdgroups));
  Launch launch{kernel,
                "attention/" + kernel + ".metal",
                arguments,
                {q, call.bound(op.key_cache), call.bound(op.value_cache), call.bound(tensors.block_table),
                 tensors.cu_seqlens, tensors.seq_lens, sinks, op.out, partials.o, partials.m, partials.l,
                 Binding::error_log(), Binding::values(parameters)},
                {splits, heads, sequences},
                size_t(simdgroups * 32)};
  if (!plan.is_decode) launch.threadgroups = {size_t(plan.tiles), heads, splits};
  return launch;
}

Launch launch_merge(const Call& call) {
  const auto& [op, plan, q, tensors, partials, sinks, parameters] = call;
  return {"paged_attention_merge",
          "attention/paged_attention_merge.metal",
          {call.q_type(), call.head_size()},
          {partials.o, partials.m, partials.l, tensors.cu_seqlens, tensors.seq_lens, sinks, op.out,
           Binding::values(parameters)},
          {size_t(ceil_div(plan.rows, kMergeRows)), size_t(op.shape.HK), size_t(op.shape.N)},
          size_t(kMergeRows * 32)};
}

void run(const PagedAttention<int64_t>& op) {
  const auto& s = op.shape;
  TORCH_CHECK_VALUE(s.T * (s.HQ / s.HK) <= kMostKeys && s.N <= kMostKeys && s.table_blocks <= INT32_MAX,
                    "paged_attention_: q: expected fewer than 2^30 query rows of a KV head (T * HQ / HK), got ",
                    s.T * (s.HQ / s.HK));
  if (s.T == 0 || s.N == 0) return;
  const Call call = call_of(op);
  std::vector<Launch> launches = {launch_attention(call)};
  if (call.plan.splits > 1) launches.push_back(launch_merge(call));
  launcher().run(launches);
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<PagedAttention, &run>(m); }

}  // namespace torch_gdn
