#include "ops/experts/moe_gate_up.h"

#include "metal/experts/pairs.h"
#include "metal/matrix.h"
#include "shaders/experts/moe_gate_up.h"

namespace torch_gdn {

namespace {

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

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<MoeGateUp, &run>(m); }

}  // namespace torch_gdn
