// The stages of the gradients as ops. They launch the kernels of the whole gradients, with all chunks as one segment.
#include "ops/gdn/chunk_bwd_stages.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "metal/gdn/chunk_bwd.h"
#include "metal/gdn/states.h"
#include "metal/implement.h"
#include "shaders/gdn/chunk_bwd_moves.h"

namespace torch_gdn {

namespace {

// The launches that move rows of tokens [B, T, HV, columns] and states [B, NT, HV, K, V] to and from matrices.
struct Moves {
  const ChunkShape<>& s;
  optional<Tensor> cu_seqlens;

  Launch rows(const Tensor& rows, const Tensor& plane, bool to_rows) const {
    auto parameters = parameters_of(plane, rows.size(3));
    parameters.rows = row_strides(rows);
    return move("gdn/chunk_bwd_rows", to_rows, rows, plane, parameters);
  }
  Launch in(const Tensor& x, const Tensor& plane) const { return rows(unit_last_stride(x), plane, false); }
  Launch out(const Tensor& plane, const Tensor& x) const { return rows(x, plane, true); }
  Launch zero(const Tensor& plane) const {
    return move("gdn/chunk_bwd_rows", false, {}, plane, parameters_of(plane, 0));
  }

  Launch states(const Tensor& states, const Tensor& blocks, bool from_blocks) const {
    auto parameters = parameters_of(blocks.select(3, 0), s.V);
    parameters.key_size = int32_t(s.K), parameters.key_rows = int32_t(blocks.size(4));
    return move("gdn/chunk_bwd_states", from_blocks, states, blocks, parameters);
  }

 private:
  ChunkBwdMoveParameters parameters_of(const Tensor& plane, int64_t columns) const {
    ChunkBwdMoveParameters parameters{};
    parameters.sequence = sequence_parameters(s, cu_seqlens);
    parameters.matrix_stride = plane.stride(2), parameters.row_stride = plane.stride(3);
    parameters.value_heads = int32_t(s.HV), parameters.columns = int32_t(columns);
    parameters.padded_columns = int32_t(plane.size(4));
    return parameters;
  }

  Launch move(const char* kernel, bool back, const Tensor& x, const Tensor& matrices,
              const ChunkBwdMoveParameters& parameters) const {
    return {kernel, {back}, {x, matrices, cu_seqlens, Binding::error_log(), parameters}, {s.NT, s.HV, s.B}, 32};
  }
};

ChunkBwdInputs inputs_of(const ChunkBwdStage<int64_t>& op, const Moves& move, const Tensor& q, const Tensor& v,
                         const Tensor& d_o, const optional<Tensor>& beta) {
  return {.q = unit_last_stride(q),
          .k = unit_last_stride(op.k),
          .v = unit_last_stride(v),
          .d_o = unit_last_stride(d_o),
          .g = op.g,
          .beta = beta.value_or(op.g),  // nobody reads it if it is 1
          .cu_seqlens = move.cu_seqlens,
          .is_summed = true,
          .is_unit = !beta.has_value()};
}

ChunkBwd one_segment(const ChunkShape<>& s, const ChunkBwdInputs& in, const ChunkBwdOutputs& out,
                     optional<double> scale, bool has_states) {
  ChunkBwd it(s, in, out, {.scale = scale, .is_whole = true, .has_states = has_states});
  it.take(0);
  return it;
}

void run(const ChunkBwdDvLocal<int64_t>& op, const Tensor& dv) {
  const auto& s = op.shape;
  if (dv.numel() == 0) return;
  const Moves move{s, index_array(op.q.device(), op.cu_seqlens)};
  const ChunkBwdInputs in = inputs_of(op, move, op.q, op.d_o, op.d_o, {});
  const ChunkBwd it = one_segment(s, in, {}, op.scale, false);
  launcher().run({it.prepare(), it.dv_local(), move.out(it.scratch.values.select(3, kBwdDu), dv)});
}

// With w in place of k_read, an inverse of I and a beta of 1, the kernel's du is the gradient of v_new.
void run(const ChunkGatedDeltaRuleBwdDhu<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& s = op.shape;
  const auto& [dh, dh0, dv2] = outputs;
  if (dv2.numel() == 0) {
    dh.zero_();
    return copy_state(op.dht, dh0);
  }
  const Moves move{s, index_array(op.q.device(), op.cu_seqlens)};
  ChunkBwdInputs in = inputs_of(op, move, op.q, op.d_o, op.d_o, {});
  in.final_gradient = state_as_f32(op.dht);
  const ChunkBwd it = one_segment(s, in, {.dinitial_state = dh0}, op.scale, true);
  const Tensor du = it.scratch.values.select(3, kBwdDu);
  launcher().run({it.prepare(), move.in(op.w, it.scratch.keys.select(3, kBwdKRead)), move.in(op.dv, du),
                  it.walk_back(0), move.out(du, dv2), move.states(dh, it.scratch.dh, true)});
}

// w and u are products of the inverse with values, of which those of w are k exp(g). With its matrices bound a plane
// further, chunk_bwd_dv_local multiplies by the inverse instead of P. Without keys, chunk_bwd_h computes r and no
// state.
void run(const PrepareWyReprBwd<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor, Tensor>& outputs) {
  const auto& s = op.shape;
  const auto& [dk, dv, dbeta, dg] = outputs;
  if (dv.numel() == 0) return;
  const Moves move{s, index_array(op.k.device(), op.cu_seqlens)};
  const ChunkBwdInputs in = inputs_of(op, move, op.k, op.v, op.du, op.beta);
  const ChunkBwd it = one_segment(s, in, {.dq = at::empty_like(dk), .dk = dk, .dg = dg}, {}, false);
  const auto& [keys, squares, channels] = std::tie(it.scratch.keys, it.scratch.squares, it.scratch.channels);
  ChunkShape<> wide = s;
  wide.K = 1, wide.V = s.V + s.K;
  const Tensor dx = at::empty({s.B, s.T, s.HV, wide.V}, op.k.options());
  const Tensor of_v = dx.narrow(3, 0, s.V), of_k = dx.narrow(3, s.V, s.K), k_read = keys.select(3, kBwdKRead);
  ChunkBwd both = one_segment(wide, in, {.dv = dx, .dbeta = dbeta}, {}, true);
  both.scratch.keys.zero_(), both.scratch.channels.zero_(), channels.select(3, kBwdDlast).zero_();
  both.scratch.betas = it.scratch.betas;
  const auto plane = [&](int n, int64_t first, int64_t end) {
    return both.scratch.values.select(3, n).narrow(4, first, end - first);
  };
  const int64_t end = both.scratch.values.size(5);
  launcher().run({it.prepare(), move.out(k_read, of_k), move.in(op.v, plane(kBwdR, 0, s.V)),
                  move.in(of_k, plane(kBwdR, s.V, end)), move.in(op.du, plane(kBwdDo, 0, s.V)),
                  move.in(op.dw, plane(kBwdDo, s.V, end))});
  static_assert(kBwdInverse == kBwdP + 1);
  both.scratch.squares = squares.flatten().slice(0, kBwdChunk * kBwdChunk);
  launcher().run({both.dv_local()});
  both.scratch.squares = squares;
  launcher().run({both.walk_forward(0, false), both.value_gradients(), move.in(of_k, k_read),
                  move.in(of_v, plane(kBwdDo, 0, s.V)), move.out(plane(kBwdDo, 0, s.V), dv)});
  launcher().run({move.zero(keys.select(3, kBwdDqRead)), move.zero(keys.select(3, kBwdDkWrite)),
                  move.zero(squares.select(3, kBwdDP)), it.intra(), it.key_gradients()});
}

// With v_new as r and a beta of 1, the kernel's dk_read is dw, whose part of dk is an output of prepare_wy_repr_bwd.
void run(const ChunkBwdDqkwg<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor, Tensor>& outputs) {
  const auto& s = op.shape;
  const auto& [dq, dk, dw, dg] = outputs;
  if (dw.numel() == 0) return;
  const Moves move{s, index_array(op.q.device(), op.cu_seqlens)};
  const ChunkBwd it = one_segment(
      s, inputs_of(op, move, op.q, op.v, op.d_o, {}),
      {.dq = dq, .dk = dk, .dv = at::empty(op.v.sizes(), op.v.options()), .dg = dg, .dbeta = at::empty_like(dg)},
      op.scale, true);
  const Tensor k_read = it.scratch.keys.select(3, kBwdDkRead);
  launcher().run({it.prepare(), move.in(op.dv, it.scratch.values.select(3, kBwdDu)),
                  move.states(op.h.contiguous(), it.scratch.h, false),
                  move.states(op.dh.contiguous(), it.scratch.dh, false), it.value_gradients(), it.state_gradients(),
                  move.out(k_read, dw), move.zero(k_read), move.zero(it.scratch.squares.select(3, kBwdDL)), it.intra(),
                  it.key_gradients()});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<ChunkBwdDvLocal, &run>(m);
  metal::implement<ChunkGatedDeltaRuleBwdDhu, &run>(m);
  metal::implement<PrepareWyReprBwd, &run>(m);
  metal::implement<ChunkBwdDqkwg, &run>(m);
}

}  // namespace torch_gdn
