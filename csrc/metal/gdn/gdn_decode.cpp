#include "ops/gdn/gdn_decode.h"

#include <ATen/ops/empty.h>

#include "metal/gates.h"
#include "metal/gdn/rule.h"
#include "metal/implement.h"
#include "metal/layers/causal_conv1d.h"
#include "shaders/gdn/parameters.h"

namespace torch_gdn {

namespace {

// The call, and the tensors that both launches read.
struct Step {
  const GdnDecode<int64_t>& op;
  Tensor qkv, mixed;
  optional<Tensor> cu_seqlens;
  StateIo states;

  int64_t members() const { return op.shape.HV / op.shape.H; }
};

ChannelOrder channel_order(const Step& step) {
  if (!step.op.is_by_key_head()) return {};
  const auto& s = step.op.shape;
  return {int32_t(s.K), int32_t(step.members() * s.V), int32_t(s.H * s.K)};
}

Launch launch_convolution(const Step& step) {
  const auto& op = step.op;
  const auto convolution = op.convolution(step.qkv, step.cu_seqlens);
  // If each sequence has one slot, locate_slots runs once for both launches.
  const bool is_shared = !op.pool.has_slot_per_token();
  const Slots slots = is_shared ? step.states.slots : slots_on(op.qkv.device(), convolution.pool);
  return launch_causal_conv1d_update(convolution, slots, channel_order(step), step.mixed);
}

// Returns the strides of a projection [B, T, HV * size], or of one that is grouped by key head, with groups `group`
// apart.
GroupedStrides grouped_strides(const Tensor& x, int64_t size, int64_t group) {
  return {x.stride(0), x.stride(1), group * x.stride(2), size * x.stride(2)};
}

// Makes the parameters of the gates, with the strides of heads within a group.
Gates gates_of(const Step& step, GdnDecodeParameters& parameters) {
  const auto& op = step.op;
  const int64_t members = step.members(), group = op.is_by_key_head() ? 2 * members : members;
  const Tensor a = op.is_by_key_head() ? op.b.narrow(-1, members, op.b.size(-1) - members) : *op.a;
  Gates gates = gates_of(a, op.b, op.gates);
  parameters.gates = gates.parameters;
  parameters.g_group = group * gates.g->stride(2);
  parameters.beta_group = group * gates.beta->stride(2);
  return gates;
}

// Returns z and sets its strides. If z is grouped by key head, it is the end of each group of qkv.
Tensor z_of(const Step& step, GdnDecodeParameters& parameters) {
  const auto& s = step.op.shape;
  const int64_t values = step.members() * s.V, before = 2 * s.K + values;
  const bool is_by_key_head = step.op.is_by_key_head();
  const Tensor z =
      is_by_key_head ? step.qkv.narrow(-1, before, step.qkv.size(-1) - before) : unit_last_stride(*step.op.z, "z");
  parameters.z = grouped_strides(z, s.V, is_by_key_head ? before + values : values);
  parameters.z_type = element_type(z);
  return z;
}

Launch launch_gdn_decode(const Step& step, const Tensor& o) {
  const auto& op = step.op;
  const auto& s = op.shape;
  const auto& states = step.states;
  const bool inner = states.value_is_inner();
  const bool is_one_token = s.T == 1 && !s.packed && !op.pool.has_slot_per_token();
  const auto weight = contiguous(op.norm_weight);
  GdnDecodeParameters parameters{};
  const Gates gates = gates_of(step, parameters);
  const Tensor z = z_of(step, parameters);
  parameters.sequence = sequence_parameters(s, step.cu_seqlens);
  parameters.slots = states.slots.parameters;
  parameters.states = state_strides(states.target, states.v_first);
  parameters.o = row_strides(o);
  parameters.key_heads = int32_t(s.H);
  parameters.value_heads = int32_t(s.HV);
  parameters.group_heads = int32_t(step.members());
  parameters.has_state_vectors = has_vector_states(states.target, states.v_first, inner);
  parameters.weight_type = element_type(weight);
  parameters.has_sigmoid = op.has_sigmoid();
  parameters.round_norm = op.round_norm;
  parameters.round_product = op.round_product();
  parameters.scale = float(scale_or_default(std::nullopt, s.K));
  parameters.eps = float(op.norm_eps);
  return {
      "gdn/gdn_decode",
      {step.mixed.scalar_type(), s.K, s.V, inner, states.dtype(), TemplateArgument::flag(is_one_token)},
      {step.mixed, gates.g, gates.beta, gates.A_log, gates.dt_bias, z, weight, states.slots.accepted, step.cu_seqlens,
       states.slots.indices, states.slots.flags, o, states.target, Binding::error_log(), parameters},
      {s.HV, s.N, 1},
      decode_threads(int(s.K), int(s.V))};
}

void run(const GdnDecode<int64_t>& op, const Tensor& output) {
  const auto& s = op.shape;
  if (s.N == 0) return;
  const auto device = op.qkv.device();
  const Step step{.op = op,
                  .qkv = unit_last_stride(op.qkv, "qkv"),
                  .mixed = at::empty({s.B, s.T, op.D}, op.qkv.options()),
                  .cu_seqlens = index_array(device, op.cu_seqlens),
                  .states = state_io(device, op.pool, op.state_v_first)};
  launcher().run({launch_convolution(step), launch_gdn_decode(step, op.out.value_or(output))});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<GdnDecode, &run>(m); }

}  // namespace torch_gdn
