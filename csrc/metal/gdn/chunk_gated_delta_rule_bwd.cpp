// Computes the gradients of the delta rules a segment of chunks at a time, so that memory does not grow with the states
// of all chunks. The first pass walks forward, and keeps the state before each segment. The second one takes the
// segments from the last to the first, computes the states of their chunks again, and then their gradients.
#include "ops/gdn/chunk_gated_delta_rule_bwd.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "metal/gdn/states.h"
#include "metal/implement.h"
#include "metal/layers/l2norm.h"
#include "shaders/core/norm_eps.h"
#include "shaders/gdn/chunk_bwd_keys.h"
#include "shaders/gdn/chunk_threads.h"

namespace torch_gdn {

namespace {

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// A segment has enough chunks to fill the cores several times, or fewer if their matrices are large, but at least one
// of each batch row.
constexpr int64_t kWavesOfSegment = 8;
constexpr int64_t kMostScratch = int64_t(1) << 27;  // bytes

// The inputs in the form that the kernels read: q, k, v and do of one dtype, the others f32.
struct Inputs {
  Tensor q, k, v, d_o, g, beta;
  optional<Tensor> q_rstd, k_rstd, initial_state, final_gradient, cu_seqlens;
  bool per_channel;
};

struct Outputs {
  Tensor dq, dk, dv, dg, dbeta, dinitial_state;
};

// The matrices of one segment (shaders/gdn/chunk_bwd.h), and the states at the borders of segments.
struct Scratch {
  int64_t capacity, segments;
  Tensor keys, values, squares, channels, betas, h, dh;
  Tensor starts;           // the state before each segment but the first
  Tensor gradients_at[2];  // of the state between two segments, in turn
};

Tensor rows_of(const Tensor& x, at::ScalarType dtype) {
  const Tensor rows = x.to(dtype);
  return rows.size(-1) == 1 || rows.stride(-1) == 1 ? rows : rows.contiguous();
}

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

Inputs inputs_of(const ChunkedBackward<int64_t>& op) {
  const auto dtype = has_one_dtype(op) ? op.q.scalar_type() : at::kFloat;
  const bool per_channel = op.channels.gk.has_value();
  Inputs in{.q = rows_of(op.q, dtype),
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

Scratch scratch_of(const ChunkShape<>& s, const Tensor& like) {
  const auto options = like.options().dtype(at::kFloat);
  const int64_t C = kBwdChunk, K = whole_slices(int(s.K)), V = whole_slices(int(s.V)), rows = whole_blocks(int(s.K));
  const int64_t floats = kBwdKeyPlanes * C * K + kBwdValuePlanes * C * V + 2 * rows * V;
  const int64_t heads = s.B * s.HV, chunk_bytes = heads * floats * int64_t(sizeof(float));
  const int64_t useful = ceil_div(kWavesOfSegment * busy_threadgroups(), heads);
  const int64_t capacity = std::clamp<int64_t>(std::min(useful, kMostScratch / chunk_bytes), 1, s.NT);
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
          .h = matrices(1, rows, V),
          .dh = matrices(1, rows, V),
          .starts = states(kept),
          .gradients_at = {states(kept > 0), states(kept > 0)}};
}

ChunkBwdParameters parameters_of(const ChunkedBackward<int64_t>& op, const ChunkShape<>& s, const Inputs& in,
                                 const Outputs& out) {
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
  if (out.dinitial_state.dim() > 1) {
    parameters.initial_gradient = state_strides(out.dinitial_state, op.state_v_first);
    parameters.has_initial_gradient = 1;
  }
  return parameters;
}

class Backward {
 public:
  Backward(const ChunkedBackward<int64_t>& op, const ChunkShape<>& shape, const Outputs& out)
      : s_(shape),
        in_(inputs_of(op)),
        out_(out),
        scratch_(scratch_of(shape, op.q)),
        parameters_(parameters_of(op, shape, in_, out)) {}

  void run() {
    const int64_t last = scratch_.segments - 1;
    for (int64_t segment = 0; segment < last; ++segment) {
      take(segment);
      launcher().run({prepare(), walk_forward(segment, true)});
    }
    for (int64_t segment = last; segment >= 0; --segment) {
      take(segment);
      launcher().run({prepare(), walk_forward(segment, false), dv_local(), walk_back(segment), value_gradients(),
                      state_gradients(), intra(), key_gradients()});
    }
  }

 private:
  void take(int64_t segment) {
    parameters_.first_row = int32_t(segment * scratch_.capacity);
    parameters_.rows = int32_t(std::min(scratch_.capacity, s_.NT - segment * scratch_.capacity));
    parameters_.capacity = int32_t(scratch_.capacity);
    parameters_.is_last = segment == scratch_.segments - 1;
  }

  std::array<size_t, 3> chunks(int64_t parts = 1) const {
    return {size_t(parameters_.rows * parts), size_t(s_.HV), size_t(s_.B)};
  }

  // Each threadgroup of a walk reads the keys, so it owns as many slices of V as a core has registers for. It owns
  // fewer if a core would have no threadgroup.
  int64_t walk_threads() const {
    const int64_t slices = ceil_div(s_.V, kBwdSlice), cores = int64_t(launcher().device().core_count);
    int64_t owned = s_.K > 128 ? 2 : 4;
    while (owned > 1 && (slices % owned != 0 || slices / owned * s_.HV * s_.N < cores)) --owned;
    return owned * kBwdThreads;
  }

  std::array<size_t, 3> walks() const {
    const int64_t slices = ceil_div(s_.V, kBwdSlice);
    return {size_t(slices * kBwdThreads / walk_threads()), size_t(s_.HV), size_t(s_.N)};
  }

  // The state before a segment. The first one starts from initial_state.
  Tensor start(int64_t segment) const {
    return segment > 0 && segment < scratch_.segments ? scratch_.starts[segment - 1] : Tensor();
  }

  Launch prepare() const {
    return {"chunk_bwd_prepare",
            "gdn/chunk_bwd_prepare.metal",
            {in_.q.scalar_type(), TemplateArgument::flag(in_.per_channel)},
            {in_.q, in_.k, in_.v, in_.d_o, in_.g, in_.beta, in_.q_rstd, in_.k_rstd, in_.cu_seqlens, scratch_.keys,
             scratch_.values, scratch_.squares, scratch_.channels, scratch_.betas, Binding::error_log(),
             Binding::values(parameters_)},
            chunks(),
            size_t(chunk_threads(kBwdChunk))};
  }

  Launch walk_forward(int64_t segment, bool keeps_state) {
    parameters_.has_carried = keeps_state;
    return {"chunk_bwd_h",
            "gdn/chunk_bwd_h.metal",
            {s_.K, walk_threads()},
            {scratch_.keys, scratch_.squares, scratch_.channels, scratch_.betas, in_.initial_state, start(segment),
             in_.cu_seqlens, scratch_.values, scratch_.h, keeps_state ? start(segment + 1) : Tensor(),
             Binding::values(parameters_)},
            walks(),
            size_t(walk_threads())};
  }

  Launch dv_local() const {
    return {"chunk_bwd_dv_local",
            "gdn/chunk_bwd_dv_local.metal",
            {int(kBwdThreads)},
            {scratch_.squares, scratch_.values, Binding::values(parameters_)},
            chunks(),
            kBwdThreads};
  }

  Launch walk_back(int64_t segment) const {
    return {"chunk_gated_delta_rule_bwd_dhu",
            "gdn/chunk_gated_delta_rule_bwd_dhu.metal",
            {s_.K, walk_threads()},
            {scratch_.keys, scratch_.squares, scratch_.channels, scratch_.betas, in_.final_gradient,
             scratch_.gradients_at[(segment + 1) % 2], in_.cu_seqlens, scratch_.values, scratch_.dh,
             scratch_.gradients_at[segment % 2], out_.dinitial_state, Binding::values(parameters_)},
            walks(),
            size_t(walk_threads())};
  }

  Launch value_gradients() const {
    return {"prepare_wy_repr_bwd",
            "gdn/prepare_wy_repr_bwd.metal",
            {out_.dv.scalar_type()},
            {scratch_.values, scratch_.betas, in_.cu_seqlens, scratch_.squares, out_.dv, out_.dbeta,
             Binding::values(parameters_)},
            chunks(),
            kBwdThreads};
  }

  Launch state_gradients() const {
    const int64_t slices = whole_slices(int(s_.K)) / kBwdSlice;
    const int64_t slices_at_once = slices % 2 == 0 ? 2 : slices % 3 == 0 ? 3 : 1;
    const int64_t threads = slices_at_once * kBwdThreads;
    return {"chunk_bwd_dqkwg",
            "gdn/chunk_bwd_dqkwg.metal",
            {threads},
            {scratch_.values, scratch_.h, scratch_.dh, scratch_.betas, in_.cu_seqlens, scratch_.keys, scratch_.channels,
             Binding::values(parameters_)},
            chunks(slices / slices_at_once),
            size_t(threads)};
  }

  Launch intra() const {
    return {"chunk_bwd_intra",
            "gdn/chunk_bwd_intra.metal",
            {whole_slices(int(s_.K)), TemplateArgument::flag(in_.per_channel)},
            {in_.g, in_.cu_seqlens, scratch_.squares, scratch_.channels, scratch_.keys, out_.dg,
             Binding::values(parameters_)},
            chunks(),
            size_t(whole_slices(int(s_.K)))};
  }

  Launch key_gradients() const {
    return {"chunk_bwd_keys",
            "gdn/chunk_bwd_keys.metal",
            {in_.q.scalar_type()},
            {in_.q, in_.k, in_.q_rstd, in_.k_rstd, in_.cu_seqlens, scratch_.keys, out_.dq, out_.dk,
             Binding::values(parameters_)},
            {size_t(parameters_.rows * (kBwdChunk / kBwdKeysRows)), size_t(s_.H), size_t(s_.B)},
            32 * kBwdKeysRows};
  }

  const ChunkShape<>& s_;
  const Inputs in_;
  const Outputs& out_;
  const Scratch scratch_;
  ChunkBwdParameters parameters_;
};

void run(const ChunkedBackward<int64_t>& op, const Gradients& outputs) {
  const auto& [dq, dk, dv, dg, dbeta, dinitial_state] = outputs;
  if (op.shape.T == 0 || op.shape.B == 0) return copy_state(op.grad_final_state, dinitial_state);
  ChunkShape<> shape = op.shape;
  shape.C = kBwdChunk;
  shape.NT = ceil_div(shape.T, shape.C) + (shape.packed ? shape.N : 0);
  Outputs out{dq, dk, dv, dg, dbeta, dinitial_state};
  const bool converts = !has_one_dtype(op);
  if (converts) {
    for (Tensor* x : {&out.dq, &out.dk, &out.dv}) *x = at::empty(x->sizes(), x->options().dtype(at::kFloat));
  }
  Backward(op, shape, out).run();
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
