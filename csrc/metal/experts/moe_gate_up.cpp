#include "ops/experts/moe_gate_up.h"

#include "metal/experts/pairs.h"
#include "shaders/experts/moe_gate_up.h"

namespace torch_gdn {

namespace {

struct Call {
  Tensor x, gate_proj, up_proj;
  int width;  // of vectors
  MoeGateUpParameters parameters;
};

Call call_of(const MoeGateUp<int64_t>& op) {
  const auto& s = op.shape;
  Call call{unit_last_stride(op.x, "x"),
            op.shared_gate_proj.value_or(op.w_gate_up.select(0, 0)),
            op.shared_up_proj.value_or(op.w_gate_up.select(0, 0)),
            1,
            {}};
  call.width = vector_width({call.x, op.w_gate_up, call.gate_proj, call.up_proj});
  auto& parameters = call.parameters;
  parameters.pairs = pair_parameters(s, op.topk_ids);
  parameters.x_stride = call.x.stride(0);
  parameters.expert_stride = op.w_gate_up.stride(0);
  parameters.row_stride = op.w_gate_up.stride(1);
  parameters.shared_gate_stride = call.gate_proj.stride(0);
  parameters.shared_up_stride = call.up_proj.stride(0);
  parameters.D = int32_count(s.D, "moe_gate_up: x", "columns");
  parameters.I = int32_count(2 * s.I, "moe_gate_up: w_gate_up", "rows") / 2;
  parameters.IS = int32_count(s.IS, "moe_gate_up: shared_gate_proj", "rows");
  return call;
}

void run(const MoeGateUp<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [hidden, shared_hidden] = outputs;
  const auto& s = op.shape;
  TORCH_CHECK_NOT_IMPLEMENTED(op.packing.bits == 0, "moe_gate_up: expected weights that are not packed on mps");
  if (s.T == 0) return;
  Call call = call_of(op);
  const auto dtype = op.x.scalar_type();
  if (is_few(s)) {
    launcher().run({{"moe_gate_up",
                     "experts/moe_gate_up.metal",
                     {dtype, most_tokens(s), call.width},
                     {call.x, op.w_gate_up, op.topk_ids, op.shared_gate_proj, op.shared_up_proj, hidden, shared_hidden,
                      Binding::error_log(), Binding::values(call.parameters)},
                     {size_t(ceil_div(std::max(s.I, s.IS), kGateUpRows)), size_t(s.T * s.k + (s.IS > 0 ? 1 : 0)), 1},
                     kGateUpSimdgroups * 32}});
    return;
  }
  const auto alignment = new_alignment(s, op.topk_ids);
  call.parameters.pairs.tiles = int32_t(alignment.tiles_of_pairs);
  launcher().run({launch_align(alignment, op.topk_ids, call.parameters.pairs),
                  {"moe_gate_up_tiles",
                   "experts/moe_gate_up_tiles.metal",
                   {dtype, call.width},
                   {call.x, op.w_gate_up, alignment.sorted_pairs, alignment.tiles, op.shared_gate_proj,
                    op.shared_up_proj, hidden, shared_hidden, Binding::values(call.parameters)},
                   {size_t(ceil_div(std::max(s.I, s.IS), kTileColumns)),
                    size_t(alignment.tiles_of_pairs + alignment.tiles_of_tokens), 1},
                   kTileThreads}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<MoeGateUp, &run>(m); }

}  // namespace torch_gdn
