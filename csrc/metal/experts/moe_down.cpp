#include "ops/experts/moe_down.h"

#include "metal/experts/pairs.h"
#include "metal/gates.h"
#include "metal/matrix.h"
#include "shaders/experts/moe_down.h"
#include "shaders/experts/moe_sum.h"

namespace torch_gdn {

namespace {

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

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<MoeDown, &run>(m); }

}  // namespace torch_gdn
