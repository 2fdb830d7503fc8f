// Computes the gradients of the delta rules a segment of chunks at a time, so that memory does not grow with the states
// of all chunks. The first pass walks forward, and keeps the state before each segment. The second one takes the
// segments from the last to the first, computes the states of their chunks again, and then their gradients.
// The stages are also ops, which take all chunks as one segment.
#include "ops/gdn/gradients.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "metal/gdn/rule.h"
#include "metal/implement.h"
#include "metal/layers/rows.h"
#include "shaders/core/parameters.h"
#include "shaders/gdn/chunk_bwd.h"
#include "shaders/gdn/parameters.h"

namespace torch_gdn {

namespace {

// The inputs in the form that the kernels read: q, k, v and do of one dtype, the others f32.
struct ChunkBwdInputs {
  Tensor q, k, v, d_o, g, beta;
  optional<Tensor> q_rstd, k_rstd, initial_state, final_gradient, cu_seqlens;
  bool per_channel = false;
  bool is_summed = false;  // g is the sum of a chunk's log decays up to each token
  bool is_unit = false;    // beta is 1, and the inverse I
};

struct ChunkBwdOutputs {
  Tensor dq, dk, dv, dg, dbeta, dinitial_state;
};

struct ChunkBwdOptions {
  optional<double> scale;
  bool use_qk_l2norm = false, state_v_first = false;
  bool is_whole = false;   // one segment has all chunks
  bool has_states = true;  // there is room for h and dh
};

// The matrices of one segment (shaders/gdn/chunk_bwd.h), and the states at the borders of segments.
struct ChunkBwdScratch {
  int64_t capacity, segments;
  Tensor keys, values, squares, channels, betas, h, dh;
  Tensor starts;           // the state before each segment but the first
  Tensor gradients_at[2];  // of the state between two segments, in turn
};

// A segment has enough chunks to fill the cores several times, or fewer if their matrices are large, but at least one
// of each batch row.
constexpr int64_t kWavesOfSegment = 8;
constexpr int64_t kMostScratch = int64_t(1) << 27;  // bytes

ChunkBwdScratch chunk_bwd_scratch(const ChunkShape<>& s, const Tensor& like, const ChunkBwdOptions& op) {
  const auto options = like.options().dtype(at::kFloat);
  const int64_t C = kBwdChunk, K = whole_slices(int(s.K)), V = whole_slices(int(s.V)), rows = whole_blocks(int(s.K));
  const int64_t floats = kBwdKeyPlanes * C * K + kBwdValuePlanes * C * V + 2 * rows * V;
  const int64_t heads = s.B * s.HV, chunk_bytes = heads * floats * int64_t(sizeof(float));
  const int64_t useful = ceil_div(kWavesOfSegment * busy_threadgroups(), heads), fits = kMostScratch / chunk_bytes;
  const int64_t capacity = op.is_whole ? s.NT : std::clamp<int64_t>(std::min(useful, fits), 1, s.NT);
  const int64_t segments = ceil_div(s.NT, capacity), kept = std::max<int64_t>(segments - 1, 0);
  const auto matrices = [&](int64_t planes, int64_t rows, int64_t columns) {
    return at::empty({s.B, capacity, s.HV, planes, rows, columns}, options);
  };
  const auto states = [&](int64_t count) { return at::empty({count, s.B, s.HV, rows, V}, options); };
  return {.capacity = capacity,
          .segments = segments,
          .keys = matrices(kBwdKeyPlanes, C, K),
          .values = matrices(kBwdValuePlanes, C, V),
          .squares = matrices(kBwdSquarePlanes, C, C),
          .channels = matrices(kBwdChannelPlanes, 1, K),
          .betas = matrices(1, 1, C),
          .h = matrices(op.has_states, rows, V),
          .dh = matrices(op.has_states, rows, V),
          .starts = states(kept),
          .gradients_at = {states(kept > 0), states(kept > 0)}};
}

ChunkBwdParameters chunk_bwd_parameters(const ChunkShape<>& s, const ChunkBwdInputs& in, const ChunkBwdOutputs& out,
                                        const ChunkBwdOptions& op) {
  const auto strides = [](const Tensor& x) { return row_strides(x.dim() == 4 ? x : x.unsqueeze(-1)); };
  ChunkBwdParameters parameters{};
  parameters.sequence = sequence_parameters(s, in.cu_seqlens);
  parameters.q = strides(in.q), parameters.k = strides(in.k), parameters.v = strides(in.v);
  parameters.d_o = strides(in.d_o), parameters.g = strides(in.g), parameters.beta = strides(in.beta);
  parameters.heads = head_groups(s);
  parameters.value_heads = int32_t(s.HV), parameters.key_heads = int32_t(s.H);
  parameters.key_size = int32_t(s.K), parameters.value_size = int32_t(s.V);
  parameters.key_columns = whole_slices(int(s.K)), parameters.value_columns = whole_slices(int(s.V));
  parameters.key_rows = whole_blocks(int(s.K));
  parameters.is_normalised = op.use_qk_l2norm;
  parameters.scale = float(scale_or_default(op.scale, s.K));
  if (in.initial_state.has_value()) {
    parameters.initial_state = state_strides(*in.initial_state, op.state_v_first);
    parameters.has_initial_state = 1;
  }
  if (in.final_gradient.has_value()) {
    parameters.final_gradient = state_strides(*in.final_gradient, op.state_v_first);
    parameters.has_final_gradient = 1;
  }
  if (out.dinitial_state.defined() && out.dinitial_state.dim() > 1) {
    parameters.initial_gradient = state_strides(out.dinitial_state, op.state_v_first);
    parameters.has_initial_gradient = 1;
  }
  return parameters;
}

class ChunkBwd {
 public:
  ChunkBwd(const ChunkShape<>& shape, const ChunkBwdInputs& inputs, const ChunkBwdOutputs& outputs,
           const ChunkBwdOptions& options)
      : scratch(chunk_bwd_scratch(shape, inputs.q, options)),
        s_(shape),
        in_(inputs),
        out_(outputs),
        parameters_(chunk_bwd_parameters(shape, in_, out_, options)) {}

  void take(int64_t segment) {
    parameters_.first_row = int32_t(segment * scratch.capacity);
    parameters_.rows = int32_t(std::min(scratch.capacity, s_.NT - segment * scratch.capacity));
    parameters_.capacity = int32_t(scratch.capacity);
    parameters_.is_last = segment == scratch.segments - 1;
  }

  Launch prepare() const {
    return {"gdn/chunk_bwd_prepare",
            {in_.q.scalar_type(), in_.is_summed ? TemplateArgument(false) : TemplateArgument::flag(in_.per_channel),
             TemplateArgument::flag(in_.is_summed), TemplateArgument::flag(in_.is_unit)},
            {in_.q, in_.k, in_.v, in_.d_o, in_.g, in_.beta, in_.q_rstd, in_.k_rstd, in_.cu_seqlens, scratch.keys,
             scratch.values, scratch.squares, scratch.channels, scratch.betas, Binding::error_log(), parameters_},
            chunks(),
            chunk_threads(kBwdChunk)};
  }

  Launch walk_forward(int64_t segment, bool keeps_state) {
    parameters_.has_carried = keeps_state;
    return {"gdn/chunk_bwd_h",
            {s_.K, walk_threads()},
            {scratch.keys, scratch.squares, scratch.channels, scratch.betas, in_.initial_state, start(segment),
             in_.cu_seqlens, scratch.values, scratch.h, keeps_state ? start(segment + 1) : Tensor(), parameters_},
            walks(),
            walk_threads()};
  }

  Launch dv_local() const {
    return {"gdn/chunk_bwd_dv_local",
            {int(kBwdThreads)},
            {scratch.squares, scratch.values, parameters_},
            chunks(),
            kBwdThreads};
  }

  Launch walk_back(int64_t segment) const {
    return {"gdn/chunk_gated_delta_rule_bwd_dhu",
            {s_.K, walk_threads()},
            {scratch.keys, scratch.squares, scratch.channels, scratch.betas, in_.final_gradient,
             scratch.gradients_at[(segment + 1) % 2], in_.cu_seqlens, scratch.values, scratch.dh,
             scratch.gradients_at[segment % 2], out_.dinitial_state, parameters_},
            walks(),
            walk_threads()};
  }

  Launch value_gradients() const {
    return {"gdn/prepare_wy_repr_bwd",
            {out_.dv.scalar_type()},
            {scratch.values, scratch.betas, in_.cu_seqlens, scratch.squares, out_.dv, out_.dbeta, parameters_},
            chunks(),
            kBwdThreads};
  }

  Launch state_gradients() const {
    const int64_t slices = whole_slices(int(s_.K)) / kBwdSlice;
    const int64_t slices_at_once = slices % 2 == 0 ? 2 : slices % 3 == 0 ? 3 : 1;
    const int64_t threads = slices_at_once * kBwdThreads;
    return {"gdn/chunk_bwd_dqkwg",
            {threads},
            {scratch.values, scratch.h, scratch.dh, scratch.betas, in_.cu_seqlens, scratch.keys, scratch.channels,
             parameters_},
            chunks(slices / slices_at_once),
            threads};
  }

  Launch intra() const {
    return {"gdn/chunk_bwd_intra",
            {whole_slices(int(s_.K)), in_.is_summed ? TemplateArgument(false) : TemplateArgument::flag(in_.per_channel),
             TemplateArgument::flag(in_.is_summed)},
            {in_.g, in_.cu_seqlens, scratch.squares, scratch.channels, scratch.keys, out_.dg, parameters_},
            chunks(),
            whole_slices(int(s_.K))};
  }

  Launch key_gradients() const {
    return {"gdn/chunk_bwd_keys",
            {in_.q.scalar_type()},
            {in_.q, in_.k, in_.q_rstd, in_.k_rstd, in_.cu_seqlens, scratch.keys, out_.dq, out_.dk, parameters_},
            {parameters_.rows * (kBwdChunk / kBwdKeysRows), s_.H, s_.B},
            32 * kBwdKeysRows};
  }

  ChunkBwdScratch scratch;

 private:
  Grid chunks(int64_t parts = 1) const { return {parameters_.rows * parts, s_.HV, s_.B}; }

  // Each threadgroup of a walk reads the keys, so it owns as many slices of V as a core has registers for. It owns
  // fewer if a core would have no threadgroup.
  int64_t walk_threads() const {
    const int64_t slices = ceil_div(s_.V, kBwdSlice), cores = int64_t(launcher().device().core_count);
    int64_t owned = s_.K > 128 ? 2 : 4;
    while (owned > 1 && (slices % owned != 0 || slices / owned * s_.HV * s_.N < cores)) --owned;
    return owned * kBwdThreads;
  }

  Grid walks() const {
    const int64_t slices = ceil_div(s_.V, kBwdSlice);
    return {slices * kBwdThreads / walk_threads(), s_.HV, s_.N};
  }

  // The state before a segment. The first one starts from initial_state.
  Tensor start(int64_t segment) const {
    return segment > 0 && segment < scratch.segments ? scratch.starts[segment - 1] : Tensor();
  }

  const ChunkShape<> s_;
  const ChunkBwdInputs in_;
  const ChunkBwdOutputs out_;
  ChunkBwdParameters parameters_;
};

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
  metal::implement<ChunkGatedDeltaRuleBackward, &run>(m);
  metal::implement<ChunkKdaBackward, &run>(m);
  metal::implement<ChunkBwdDvLocal, &run>(m);
  metal::implement<ChunkGatedDeltaRuleBwdDhu, &run>(m);
  metal::implement<PrepareWyReprBwd, &run>(m);
  metal::implement<ChunkBwdDqkwg, &run>(m);
}

}  // namespace torch_gdn
