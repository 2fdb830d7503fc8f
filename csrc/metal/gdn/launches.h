// Launches that several ops share. Tensors are checked, allocated and in the form that the kernels read.
#pragma once
#include "launch/prefill.h"
#include "metal/gates.h"
#include "metal/slots.h"
#include "ops/gdn/chunk_gated_delta_rule.h"
#include "shaders/gdn/state_tile.h"

namespace torch_gdn {

// Initial and final states: two tensors, or a pool for both.
struct StateIo {
  optional<Tensor> source;
  Tensor target;  // undefined: not asked for
  Slots slots;
  Checkpoints checkpoints;
  bool v_first;

  at::ScalarType dtype() const {
    return source.has_value() ? source->scalar_type() : target.defined() ? target.scalar_type() : at::kFloat;
  }

  Binding bound_source() const { return slots.source(source); }

  template <typename Parameters>
  void set(Parameters& parameters) const {
    parameters.slots = slots.parameters;
    parameters.checkpoints = checkpoints.parameters;
    if (source.has_value()) {
      parameters.initial_state = state_strides(*source, v_first);
      parameters.has_initial_state = 1;
    }
    if (target.defined()) {
      parameters.final_state = state_strides(target, v_first);
      parameters.has_final_state = 1;
    }
  }
};

// A final state without elements was not asked for.
StateIo state_io(const optional<Tensor>& initial_state, const Tensor& final_state, bool v_first);
StateIo state_io(at::Device device, const StatePool& pool, bool v_first);

// For calls without tokens.
void copy_state(const optional<Tensor>& initial_state, const Tensor& final_state);

std::array<size_t, 3> state_threadgroups(const ChunkShape<>& shape);

struct RuleInputs {
  ChunkShape<> shape;
  Tensor q, k, v;
  Gates gates;
  optional<Tensor> cu_seqlens;
  double scale;
  bool normalise;

  template <typename Parameters>
  Parameters parameters(const StateIo& states, const Tensor& o) const {
    Parameters parameters{};
    parameters.sequence = sequence_parameters(shape);
    parameters.q = row_strides(q);
    parameters.k = row_strides(k);
    parameters.v = row_strides(v);
    parameters.o = row_strides(o);
    parameters.gates = gates.parameters;
    parameters.heads = head_groups(shape);
    parameters.value_heads = int32_t(shape.HV);
    parameters.value_size = int32_t(shape.V);
    parameters.counted_chunk_size = int32_t(shape.C);
    parameters.scale = float(scale);
    states.set(parameters);
    return parameters;
  }
};

RuleInputs rule_inputs(const GatedDeltaRule<>& op);

// Where asked for, q and k of their own, normalised by the launches that are returned.
std::vector<Launch> normalise_keys(RuleInputs& in);

// For sequences of these sizes on this device.
PrefillChoice choose_prefill(const ChunkedRule<int64_t>& op, bool has_channel_decays = false);

Launch launch_fused_recurrent_gated_delta_rule(const RuleInputs& in, const ChannelDecays& channels,
                                               const StateIo& states, const Tensor& o);
// chunk_size: see fused_chunk_size(); 0: chosen.
Launch launch_fused_chunk_gated_delta_rule(const RuleInputs& in, int64_t chunk_size, const StateIo& states,
                                           const Tensor& o);

Launch launch_chunk_fwd_intra(const RuleInputs& in, const Tensor& g_cumsum, const Tensor& w, const Tensor& u);

struct ChunkFwdHCall {
  ChunkShape<> shape;
  Tensor k, w, u, g_cumsum;
  optional<Tensor> cu_seqlens;
  StateIo states;
  Tensor h, v_new;
  bool has_channel_decays = false;  // g_cumsum [B, NT, HV, K], and k decayed to the end of its chunk
};
Launch launch_chunk_fwd_h(const ChunkFwdHCall& call);

struct ChunkFwdOCall {
  ChunkShape<> shape;
  Tensor q, k, v_new, h, g_cumsum;
  optional<Tensor> cu_seqlens;
  Slots slots;
  bool v_first;
  double scale;
  Tensor o;
  bool has_scores = false;  // [B, T, HV, C] in the place of k, and q decayed
};
Launch launch_chunk_fwd_o(const ChunkFwdOCall& call);

}  // namespace torch_gdn
