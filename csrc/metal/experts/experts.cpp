// The choice of each token's experts, and the products with their weights, for few tokens and for many.
#include "ops/experts/experts.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>

#include "metal/gates.h"
#include "metal/implement.h"
#include "shaders/experts/parameters.h"
#include "shaders/quantized/parameters.h"

namespace torch_gdn {

namespace {

// More tokens than this are multiplied in tiles, which read the weight once per 32 tokens. A tile has 64 experts, so
// few tokens would give few threadgroups.
constexpr int64_t kFewLogits = 64;

void run(const MoeLogits<int64_t>& op, const Tensor& router_logits) {
  if (op.T == 0) return;
  const Tensor x = unit_last_stride(op.x, "x");
  QuantizedLinearParameters parameters{};
  parameters.weight = matrix_parameters(op.weight, std::nullopt, std::nullopt, {});
  parameters.x_stride = x.stride(0);
  parameters.bias_type = kAbsent;
  parameters.M = int32_count(op.T, "moe_logits: x", "tokens");
  parameters.N = int32_count(op.E, "moe_logits: weight", "experts");
  parameters.K = int32_count(op.D, "moe_logits: x", "columns");
  const int width = vector_width({x, op.weight});
  const auto dtype = x.scalar_type();
  if (op.T <= kFewLogits) {
    const auto most = int64_t(std::bit_ceil(uint64_t(std::min<int64_t>(op.T, kLogitsTokens))));
    launcher().run({{"experts/moe_logits",
                     {dtype, most, width},
                     {x, op.weight, router_logits, parameters},
                     {ceil_div(op.E, kLogitsExperts), ceil_div(op.T, most), 1},
                     kLogitsSimdgroups * 32}});
    return;
  }
  launcher().run({{"quantized/quantized_linear_tiles",
                   {dtype, width, 0, at::kFloat},
                   {x, op.weight, Binding(), Binding(), Binding(), router_logits, parameters},
                   {ceil_div(op.E, 2 * kTileColumns), ceil_div(op.T, kTilePairs), 1},
                   kTileThreads}});
}

void run(const MoeRouter<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [topk_weights, topk_ids] = outputs;
  const Tensor logits = unit_last_stride(op.router_logits, "router_logits");
  const auto bias = contiguous(op.correction_bias);
  MoeRouterParameters parameters{};
  parameters.logits_stride = logits.stride(0);
  parameters.tokens = int32_count(op.T, "moe_router: router_logits", "tokens");
  parameters.experts = int32_t(op.E);
  parameters.top_k = int32_t(op.top_k);
  parameters.groups = int32_t(op.n_group);
  parameters.open_groups = int32_t(op.topk_group);
  parameters.group_size = int32_t(op.E / op.n_group);
  parameters.bias_type = bias.has_value() ? element_type(*bias) : kAbsent;
  parameters.has_sigmoid = op.has_sigmoid();
  parameters.renormalize = op.renormalize;
  parameters.scale = float(op.routed_scaling_factor);
  const auto experts_per_lane = std::bit_ceil(uint64_t(ceil_div(op.E, 32)));
  launcher().run({{"experts/moe_router",
                   {logits.scalar_type(), experts_per_lane},
                   {logits, bias, topk_weights, topk_ids, parameters},
                   {op.T, 1, 1},
                   32}});
}

constexpr int64_t kFewTokens = 8;  // the most tokens whose sums fit in a kernel's registers

// Returns whether a step has so few tokens that it uses the kernels that read each active expert's weights once.
bool is_few(const ExpertShape<>& shape) {
  return shape.T <= kFewTokens && shape.T * shape.k <= kFewPairs && (shape.T > 1 || shape.k <= 32);
}

// Returns the number of tokens whose sums the kernel's registers hold.
int64_t most_tokens(const ExpertShape<>& shape) { return shape.T == 1 ? 1 : kFewTokens; }

PairParameters pair_parameters(const ExpertShape<>& shape, const Tensor& topk_ids) {
  PairParameters parameters{};
  parameters.token_stride = topk_ids.stride(0);
  parameters.slot_stride = topk_ids.stride(1);
  parameters.id_bytes = int32_t(topk_ids.element_size());
  parameters.tokens = int32_count(shape.T, "experts", "tokens");
  parameters.k = int32_t(shape.k);
  parameters.experts = int32_count(shape.E, "experts", "experts");
  parameters.count =
      int32_count(shape.T * (shape.k + 1), "experts", "pairs of a token and an expert") - int32_t(shape.T);
  parameters.op = op_name();
  return parameters;
}

// The output of moe_align for topk_ids.
struct Alignment {
  Tensor sorted_pairs, tiles;
  int64_t tiles_of_pairs, tiles_of_tokens;  // tiles_of_tokens belong to the shared expert
};

Alignment new_alignment(const ExpertShape<>& shape, const Tensor& topk_ids) {
  const auto options = topk_ids.options().dtype(at::kInt);
  const int64_t pairs = shape.T * shape.k, tiles = most_tiles(pairs, shape.E);
  return {at::empty({pairs}, options), at::empty({tiles, 3}, options), tiles,
          shape.IS > 0 ? ceil_div(shape.T, kTilePairs) : 0};
}

Launch launch_align(const Alignment& alignment, const Tensor& topk_ids, const PairParameters& parameters) {
  constexpr int64_t kThreads = 32;
  return {"experts/moe_align",
          {kThreads},
          {topk_ids, alignment.sorted_pairs, alignment.tiles, Binding::error_log(), parameters},
          {parameters.experts + 1, 1, 1},
          kThreads};
}

struct GateUpCall {
  Tensor x, gate_proj, up_proj;
  int width;  // elements per load of a vector
  MoeGateUpParameters parameters;
};

GateUpCall call_of(const MoeGateUp<int64_t>& op) {
  const auto& s = op.shape;
  GateUpCall call{unit_last_stride(op.x, "x"),
                  op.shared_gate_proj.value_or(op.w_gate_up.select(0, 0)),
                  op.shared_up_proj.value_or(op.w_gate_up.select(0, 0)),
                  1,
                  {}};
  call.width = vector_width({call.x, op.w_gate_up, call.gate_proj, call.up_proj});
  auto& parameters = call.parameters;
  parameters.pairs = pair_parameters(s, op.topk_ids);
  parameters.x_stride = call.x.stride(0);
  parameters.experts = matrix_parameters(op.w_gate_up, op.w_scales, op.w_biases, op.packing);
  if (op.shared_gate_proj.has_value()) {
    const auto& packing = op.shared_packing;
    parameters.shared_gate =
        matrix_parameters(*op.shared_gate_proj, op.shared_gate_scales, op.shared_gate_biases, packing);
    parameters.shared_up = matrix_parameters(*op.shared_up_proj, op.shared_up_scales, op.shared_up_biases, packing);
  }
  parameters.D = int32_count(s.D, "moe_gate_up: x", "columns");
  parameters.I = int32_count(2 * s.I, "moe_gate_up: w_gate_up", "rows") / 2;
  parameters.IS = int32_count(s.IS, "moe_gate_up: shared_gate_proj", "rows");
  return call;
}

void run(const MoeGateUp<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [hidden, shared_hidden] = outputs;
  const auto& s = op.shape;
  if (s.T == 0) return;
  GateUpCall call = call_of(op);
  const auto dtype = op.x.scalar_type();
  if (is_few(s)) {
    const bool is_packed = op.packing.bits != 0;
    const int64_t rows = is_packed ? GateUpPlan<4>::kRows : GateUpPlan<0>::kRows;
    const int64_t threads = 32 * (is_packed ? GateUpPlan<4>::kSimdgroups : GateUpPlan<0>::kSimdgroups);
    launcher().run({{"experts/moe_gate_up",
                     {dtype, most_tokens(s), call.width, bits_of(op.packing), bits_of(op.shared_packing)},
                     {call.x, op.w_gate_up, op.w_scales, op.w_biases, op.topk_ids, op.shared_gate_proj,
                      op.shared_gate_scales, op.shared_gate_biases, op.shared_up_proj, op.shared_up_scales,
                      op.shared_up_biases, hidden, shared_hidden, Binding::error_log(), call.parameters},
                     {ceil_div(std::max(s.I, s.IS), rows), s.T * s.k + (s.IS > 0 ? 1 : 0), 1},
                     threads}});
    return;
  }
  const auto alignment = new_alignment(s, op.topk_ids);
  call.parameters.pairs.tiles = int32_t(alignment.tiles_of_pairs);
  launcher().run(
      {launch_align(alignment, op.topk_ids, call.parameters.pairs),
       {"experts/moe_gate_up_tiles",
        {dtype, call.width, bits_of(op.packing), bits_of(op.shared_packing)},
        {call.x, op.w_gate_up, op.w_scales, op.w_biases, alignment.sorted_pairs, alignment.tiles, op.shared_gate_proj,
         op.shared_gate_scales, op.shared_gate_biases, op.shared_up_proj, op.shared_up_scales, op.shared_up_biases,
         hidden, shared_hidden, call.parameters},
        {ceil_div(std::max(s.I, s.IS), kTileColumns), alignment.tiles_of_pairs + alignment.tiles_of_tokens, 1},
        kTileThreads}});
}

struct DownCall {
  Tensor hidden, shared_hidden, shared_down_proj;  // the shared ones are undefined if there is no shared expert
  Tensor residual;                                 // undefined if there is no residual
  int width;                                       // elements per load of a vector
  MoeDownParameters parameters;
};

DownCall call_of(const MoeDown<int64_t>& op) {
  const auto& s = op.shape;
  DownCall call{as_contiguous(op.hidden, "hidden"), {}, op.shared_down_proj.value_or(Tensor()), {}, 1, {}};
  auto& parameters = call.parameters;
  call.width = vector_width({call.hidden, op.w_down});
  if (op.shared_hidden.has_value()) {
    call.shared_hidden = as_contiguous(*op.shared_hidden, "shared_hidden");
    call.width = std::min(call.width, vector_width({call.shared_hidden, call.shared_down_proj}));
    parameters.shared = matrix_parameters(call.shared_down_proj, op.shared_scales, op.shared_biases, op.shared_packing);
  }
  if (op.residual.has_value()) call.residual = as_contiguous(*op.residual, "residual");
  parameters.has_residual = op.residual.has_value();
  parameters.pairs = pair_parameters(s, op.topk_ids);
  parameters.experts = matrix_parameters(op.w_down, op.w_scales, op.w_biases, op.packing);
  parameters.weight_token_stride = op.topk_weights.stride(0);
  parameters.weight_slot_stride = op.topk_weights.stride(1);
  parameters.gate_stride = op.shared_gate.has_value() ? op.shared_gate->stride(0) : 0;
  parameters.D = int32_count(s.D, "moe_down: w_down", "rows");
  parameters.I = int32_count(s.I, "moe_down: w_down", "columns");
  parameters.IS = int32_count(s.IS, "moe_down: shared_down_proj", "columns");
  parameters.weight_type = element_type(op.topk_weights);
  parameters.gate_type = op.shared_gate.has_value() ? element_type(*op.shared_gate) : kAbsent;
  return call;
}

void run(const MoeDown<int64_t>& op, const Tensor& y) {
  const auto& s = op.shape;
  if (s.T == 0) return;
  DownCall call = call_of(op);
  const auto dtype = y.scalar_type();
  if (is_few(s)) {
    const int64_t rows = op.packing.bits == 0 ? DownPlan<0>::kRows : DownPlan<4>::kRows;
    launcher().run({{"experts/moe_down",
                     {dtype, most_tokens(s), call.width, bits_of(op.packing), bits_of(op.shared_packing)},
                     {call.hidden, op.w_down, op.w_scales, op.w_biases, op.topk_weights, op.topk_ids,
                      call.shared_hidden, call.shared_down_proj, op.shared_scales, op.shared_biases, op.shared_gate,
                      call.residual, y, Binding::error_log(), call.parameters},
                     {ceil_div(s.D, rows), 1, 1},
                     kDownSimdgroups * 32}});
    return;
  }
  const auto alignment = new_alignment(s, op.topk_ids);
  call.parameters.pairs.tiles = int32_t(alignment.tiles_of_pairs);
  const Tensor products = at::empty({s.T * s.k + (s.IS > 0 ? s.T : 0), s.D}, call.hidden.options().dtype(at::kFloat));
  launcher().run(
      {launch_align(alignment, op.topk_ids, call.parameters.pairs),
       {"experts/moe_down_tiles",
        {dtype, call.width, bits_of(op.packing), bits_of(op.shared_packing)},
        {call.hidden, op.w_down, op.w_scales, op.w_biases, alignment.sorted_pairs, alignment.tiles, call.shared_hidden,
         call.shared_down_proj, op.shared_scales, op.shared_biases, products, call.parameters},
        {ceil_div(s.D, 2 * kTileColumns), alignment.tiles_of_pairs + alignment.tiles_of_tokens, 1},
        kTileThreads},
       {"experts/moe_sum",
        {dtype},
        {products, op.topk_weights, op.topk_ids, op.shared_gate, call.residual, y, call.parameters},
        {ceil_div(s.D, kSumThreads), s.T, 1},
        kSumThreads}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<MoeLogits, &run>(m);
  metal::implement<MoeRouter, &run>(m);
  metal::implement<MoeGateUp, &run>(m);
  metal::implement<MoeDown, &run>(m);
}

}  // namespace torch_gdn
