// Converts the inputs of a delta rule to the form that its kernels read.
#pragma once
#include "metal/gates.h"
#include "metal/gdn/states.h"
#include "ops/gdn/gated_delta_rule.h"

namespace torch_gdn {

struct RuleInputs {
  ChunkShape<> shape;
  Tensor q, k, v;
  Gates gates;
  ChannelGates gk, gv;
  optional<Tensor> cu_seqlens;
  double scale;
  bool normalise;

  template <typename Parameters>
  Parameters parameters(const StateIo& states, const Tensor& o) const {
    Parameters parameters{};
    parameters.sequence = sequence_parameters(shape, cu_seqlens);
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

// If the call asks for normalised q and k, replaces them by new tensors. The returned launches fill these.
std::vector<Launch> normalise_keys(RuleInputs& in);

}  // namespace torch_gdn
