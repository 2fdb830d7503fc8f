// Computes the gradients of the delta rules a segment of chunks at a time, so that memory does not grow with the states
// of all chunks. The first pass walks forward, and keeps the state before each segment. The second one takes the
// segments from the last to the first, computes the states of their chunks again, and then their gradients.
#include "ops/gdn/chunk_gated_delta_rule_bwd.h"

#include <ATen/ops/empty.h>

#include "metal/gdn/chunk_bwd.h"
#include "metal/gdn/states.h"
#include "metal/implement.h"
#include "metal/layers/l2norm.h"
#include "shaders/core/norm_eps.h"

namespace torch_gdn {

namespace {

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Tensor rows_of(const Tensor& x, at::ScalarType dtype) { return unit_last_stride(x.to(dtype)); }

Tensor rstd_of(const Tensor& x) {
  const Tensor y = at::empty(x.sizes(), x.options());  // nobody reads it
  const Tensor rstd = at::empty({x.size(0), x.size(1), x.size(2)}, x.options().dtype(at::kFloat));
  launcher().run({launch_l2norm(x, kNormEps, y, rstd)});
  return rstd;
}

bool has_one_dtype(const ChunkedBackward<int64_t>& op) {
  const auto dtype = op.q.scalar_type();
  return op.v.scalar_type() == dtype && op.grad_o.scalar_type() == dtype;
}

ChunkBwdInputs inputs_of(const ChunkedBackward<int64_t>& op) {
  const auto dtype = has_one_dtype(op) ? op.q.scalar_type() : at::kFloat;
  const bool per_channel = op.channels.gk.has_value();
  ChunkBwdInputs in{.q = rows_of(op.q, dtype),
                    .k = rows_of(op.k, dtype),
                    .v = rows_of(op.v, dtype),
                    .d_o = rows_of(op.grad_o, dtype),
                    .g = per_channel ? rows_of(*op.channels.gk, at::kFloat) : op.g->to(at::kFloat),
                    .beta = op.beta->to(at::kFloat),
                    .q_rstd = {},
                    .k_rstd = {},
                    .initial_state = state_as_f32(op.initial_state),
                    .final_gradient = state_as_f32(op.grad_final_state),
                    .cu_seqlens = index_array(op.q.device(), op.cu_seqlens),
                    .per_channel = per_channel};
  if (op.use_qk_l2norm) {
    in.q_rstd = rstd_of(in.q);
    in.k_rstd = rstd_of(in.k);
  }
  return in;
}

void run(const ChunkedBackward<int64_t>& op, const Gradients& outputs) {
  const auto& [dq, dk, dv, dg, dbeta, dinitial_state] = outputs;
  if (op.shape.T == 0 || op.shape.B == 0) return copy_state(op.grad_final_state, dinitial_state);
  ChunkShape<> shape = op.shape;
  shape.C = kBwdChunk;
  shape.NT = ceil_div(shape.T, shape.C) + (shape.packed ? shape.N : 0);
  ChunkBwdOutputs out{dq, dk, dv, dg, dbeta, dinitial_state};
  const bool converts = !has_one_dtype(op);
  if (converts) {
    for (Tensor* x : {&out.dq, &out.dk, &out.dv}) *x = at::empty(x->sizes(), x->options().dtype(at::kFloat));
  }
  ChunkBwd it(shape, inputs_of(op), out,
              {.scale = op.scale, .use_qk_l2norm = op.use_qk_l2norm, .state_v_first = op.state_v_first});
  const int64_t last = it.scratch.segments - 1;
  for (int64_t segment = 0; segment < last; ++segment) {
    it.take(segment);
    launcher().run({it.prepare(), it.walk_forward(segment, true)});
  }
  for (int64_t segment = last; segment >= 0; --segment) {
    it.take(segment);
    launcher().run({it.prepare(), it.walk_forward(segment, false), it.dv_local(), it.walk_back(segment),
                    it.value_gradients(), it.state_gradients(), it.intra(), it.key_gradients()});
  }
  if (!converts) return;
  dq.copy_(out.dq);
  dk.copy_(out.dk);
  dv.copy_(out.dv);
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<ChunkGatedDeltaRuleBackward, &run>(m);
  metal::implement<ChunkKdaBackward, &run>(m);
}

}  // namespace torch_gdn
