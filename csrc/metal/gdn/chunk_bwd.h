// The launches that compute gradients of the delta rules, a segment of chunks at a time. The ops of single stages take
// all chunks as one segment.
#pragma once
#include <ATen/ops/empty.h>

#include <algorithm>

#include "metal/parameters.h"
#include "shaders/gdn/chunk_bwd_keys.h"
#include "shaders/gdn/chunk_threads.h"

namespace torch_gdn {

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

inline ChunkBwdScratch chunk_bwd_scratch(const ChunkShape<>& s, const Tensor& like, const ChunkBwdOptions& op) {
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

inline ChunkBwdParameters chunk_bwd_parameters(const ChunkShape<>& s, const ChunkBwdInputs& in,
                                               const ChunkBwdOutputs& out, const ChunkBwdOptions& op) {
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

}  // namespace torch_gdn
