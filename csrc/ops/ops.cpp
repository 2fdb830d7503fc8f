// Every schema of torch.ops.gdn, and what happens to them under autograd: the ops are forward only.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace {

using c10::DispatchKeySet;
using torch::CppFunction;
using torch::jit::Stack;

// Raises for an input that would need a gradient; else goes on below autograd. A tensor that is written to gets a new
// version, so that autograd refuses it where it was saved before.
void forward_only(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  if (at::GradMode::is_enabled()) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      TORCH_CHECK(!values[i].isTensor() || !values[i].toTensor().requires_grad(), op.schema().name(), ": ",
                  arguments[i].name(), ": expected a tensor that does not require grad (the op has no backward; use ",
                  "torch.no_grad() or detach()), got one that does");
    }
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias == nullptr || !alias->isWrite() || !values[i].isTensor() || values[i].toTensor().is_inference()) continue;
    values[i].toTensor().unsafeGetTensorImpl()->bump_version();
  }
  const at::AutoDispatchBelowAutograd below_autograd;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace

TORCH_LIBRARY(gdn, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "chunk_local_cumsum(Tensor g, int chunk_size=64, Tensor? cu_seqlens=None, Tensor? chunk_indices=None) -> Tensor",
      tags);
  m.def(
      "chunk_scaled_dot_kkt(Tensor k, Tensor g, Tensor beta, Tensor? cu_seqlens=None, int chunk_size=64, "
      "Tensor? chunk_indices=None) -> Tensor",
      tags);
  m.def("solve_tril(Tensor A, Tensor? cu_seqlens=None, Tensor? chunk_indices=None) -> Tensor", tags);
  m.def(
      "recompute_w_u(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor g, Tensor? cu_seqlens=None, "
      "Tensor? chunk_indices=None) -> (Tensor w, Tensor u)",
      tags);
  m.def(
      "chunk_fwd_h(Tensor k, Tensor w, Tensor u, Tensor g, Tensor? initial_state=None, bool output_final_state=False, "
      "int chunk_size=64, bool state_v_first=False, Tensor? cu_seqlens=None, Tensor? chunk_indices=None) -> "
      "(Tensor h, Tensor v_new, Tensor final_state)",
      tags);
  m.def(
      "chunk_fwd_o(Tensor q, Tensor k, Tensor v, Tensor h, Tensor g, float? scale=None, bool state_v_first=False, "
      "Tensor? cu_seqlens=None, int chunk_size=64, Tensor? chunk_indices=None) -> Tensor",
      tags);
  m.def("l2norm(Tensor x, float eps=1e-6) -> Tensor", tags);
  // use_gate_in_kernel: g is raw, the log decay is -exp(A_log) softplus(g + dt_bias). use_beta_sigmoid_in_kernel: beta
  // is a logit; allow_neg_eigval: its sigmoid is doubled. output_dtype: of o, None or float32 (a float16 readout can
  // overflow). head_grouping: "block", or "tiled" where a key head serves every H-th value head (GGUF's order).
  // return_intermediate_states: h, the state before each chunk.
  // In place: a sequence's state is read from and written to its slot of the pool (the names are those of
  // causal_conv1d_update_).
  m.def(
      "chunk_gated_delta_rule_(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state_pool, "
      "Tensor? state_indices=None, Tensor? has_initial_state=None, int null_index=-1, float? scale=None, "
      "bool use_qk_l2norm_in_kernel=False, bool state_v_first=False, Tensor? cu_seqlens=None, "
      "Tensor? chunk_indices=None, int chunk_size=64, bool use_gate_in_kernel=False, Tensor? A_log=None, "
      "Tensor? dt_bias=None, bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, "
      "ScalarType? output_dtype=None, str head_grouping='block', bool return_intermediate_states=False) -> "
      "(Tensor o, Tensor h)",
      tags);
  m.def(
      "fused_recurrent_gated_delta_rule_(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor(a!) state_pool, "
      "Tensor? state_indices=None, Tensor? has_initial_state=None, int null_index=-1, float? scale=None, "
      "bool use_qk_l2norm_in_kernel=False, bool state_v_first=False, Tensor? cu_seqlens=None, Tensor? gk=None, "
      "Tensor? gv=None, bool use_gate_in_kernel=False, Tensor? A_log=None, Tensor? dt_bias=None, "
      "bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, ScalarType? output_dtype=None, "
      "str head_grouping='block') -> Tensor o",
      tags);
  m.def(
      "gdn_gating(Tensor A_log, Tensor a, Tensor b, Tensor? dt_bias=None, bool allow_neg_eigval=False) -> "
      "(Tensor g, Tensor beta)",
      tags);
  m.def(
      "rms_norm_gated(Tensor x, Tensor g, Tensor? weight=None, float eps=1e-6, str activation='silu', "
      "bool round_norm=False) -> Tensor",
      tags);
  m.def(
      "causal_conv1d(Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, "
      "bool output_final_state=False, int? state_width=None, str? activation=None, Tensor? cu_seqlens=None, "
      "Tensor? seq_idx=None) -> (Tensor y, Tensor final_state)",
      tags);
  m.def(
      "causal_conv1d_update_(Tensor x, Tensor weight, Tensor(a!) state_pool, Tensor? state_indices=None, "
      "Tensor? has_initial_state=None, int null_index=-1, Tensor? bias=None, str? activation=None, "
      "Tensor? cu_seqlens=None) -> Tensor y",
      tags);
  m.def(
      "chunk_gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale=None, "
      "Tensor? initial_state=None, bool output_final_state=False, bool use_qk_l2norm_in_kernel=False, "
      "bool state_v_first=False, Tensor? cu_seqlens=None, Tensor? chunk_indices=None, int chunk_size=64, "
      "bool use_gate_in_kernel=False, Tensor? A_log=None, Tensor? dt_bias=None, "
      "bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, ScalarType? output_dtype=None, "
      "str head_grouping='block', bool return_intermediate_states=False) -> "
      "(Tensor o, Tensor final_state, Tensor h)",
      tags);
  // gk, gv: decays for each channel of K and of V, on top of g. beta may be [B, T, HV, V]. g None: no decay; beta
  // None: 1.
  m.def(
      "fused_recurrent_gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor? g=None, Tensor? beta=None, "
      "float? scale=None, Tensor? initial_state=None, bool output_final_state=False, "
      "bool use_qk_l2norm_in_kernel=False, bool state_v_first=False, Tensor? cu_seqlens=None, Tensor? gk=None, "
      "Tensor? gv=None, bool use_gate_in_kernel=False, Tensor? A_log=None, Tensor? dt_bias=None, "
      "bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, ScalarType? output_dtype=None, "
      "str head_grouping='block') -> (Tensor o, Tensor final_state)",
      tags);
  m.def(
      "aura_encode(Tensor x, Tensor signs, Tensor boundaries, Tensor codebook, bool with_means=False) -> "
      "(Tensor codes, Tensor norms, Tensor means)",
      tags);
  m.def(
      "aura_encode_(Tensor x, Tensor slots, Tensor signs, Tensor boundaries, Tensor codebook, Tensor(a!) codes, "
      "Tensor(b!) norms, Tensor(c!)? means=None) -> ()",
      tags);
  m.def(
      "aura_decode(Tensor codes, Tensor norms, Tensor codebook, Tensor signs, Tensor? means=None, bool rotated=False, "
      "ScalarType? dtype=None) -> Tensor",
      tags);
  m.def("aura_rotate(Tensor x, Tensor signs, float scale=1.0, bool inverse=False) -> Tensor", tags);
  m.def(
      "aura_flash_p1(Tensor q_rot, Tensor key_codes, Tensor key_norms, Tensor key_codebook, Tensor value_codes, "
      "Tensor value_norms, Tensor value_codebook, Tensor? key_means=None, Tensor? q_sums=None, "
      "Tensor? value_means=None, Tensor? starts=None, bool causal=True, SymInt? q_offset=None, int window=0, "
      "SymInt block_size=64) -> (Tensor o_partials, Tensor m_partials, Tensor l_partials, Tensor mean_partials)",
      tags);
  m.def(
      "aura_flash_p2(Tensor o_partials, Tensor m_partials, Tensor l_partials, Tensor value_signs, "
      "Tensor? mean_partials=None, Tensor? sinks=None, ScalarType? dtype=None) -> Tensor",
      tags);
  m.def(
      "aura_attention(Tensor q, Tensor key_codes, Tensor key_norms, Tensor key_codebook, Tensor key_signs, "
      "Tensor value_codes, Tensor value_norms, Tensor value_codebook, Tensor value_signs, Tensor? key_means=None, "
      "Tensor? value_means=None, Tensor? starts=None, Tensor? sinks=None, float? scale=None, bool causal=True, "
      "SymInt? q_offset=None, int window=0, SymInt? block_size=None) -> Tensor",
      tags);
}

TORCH_LIBRARY_IMPL(gdn, Autograd, m) {
  for (const char* op : {"chunk_local_cumsum",
                         "chunk_scaled_dot_kkt",
                         "solve_tril",
                         "recompute_w_u",
                         "chunk_fwd_h",
                         "chunk_fwd_o",
                         "l2norm",
                         "chunk_gated_delta_rule",
                         "fused_recurrent_gated_delta_rule",
                         "chunk_gated_delta_rule_",
                         "fused_recurrent_gated_delta_rule_",
                         "aura_encode",
                         "aura_encode_",
                         "aura_decode",
                         "aura_rotate",
                         "aura_flash_p1",
                         "aura_flash_p2",
                         "aura_attention",
                         "causal_conv1d",
                         "causal_conv1d_update_",
                         "rms_norm_gated",
                         "gdn_gating"}) {
    m.impl(op, CppFunction::makeFromBoxedFunction<&forward_only>());
  }
}
