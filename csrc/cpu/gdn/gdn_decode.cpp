#include "ops/gdn/gdn_decode.h"

#include <ATen/ops/cat.h>

#include "cpu/define.h"
#include "cpu/gdn/recurrence.h"
#include "cpu/layers/kernels.h"

namespace torch_gdn::cpu {
namespace {

// The projections of the layer: x [B, T, D], z [B, T, HV, V], b and a [B, T, HV].
struct Projections {
  Tensor x, z, b, a;
};

Projections projections_of(const GdnDecode<int64_t>& op) {
  const auto& s = op.shape;
  if (!op.is_by_key_head()) return {op.qkv, op.z->unflatten(-1, {s.HV, s.V}), op.b, *op.a};
  const int64_t members = s.HV / s.H, values = members * s.V;
  const Tensor heads = op.qkv.unflatten(-1, {s.H, 2 * s.K + 2 * values});
  const auto part = [&](int64_t first, int64_t count) { return heads.narrow(-1, first, count).flatten(2); };
  const Tensor gates = op.b.unflatten(-1, {s.H, 2 * members});
  return {at::cat({part(0, s.K), part(s.K, s.K), part(2 * s.K, values)}, -1),
          part(2 * s.K + values, values).unflatten(-1, {s.HV, s.V}), gates.narrow(-1, 0, members).flatten(2),
          gates.narrow(-1, members, members).flatten(2)};
}

Tensor convolve(const GdnDecode<int64_t>& op, const Tensor& x) {
  const Tensor y = at::empty(x.sizes(), x.options());
  causal_conv1d_update(op.convolution(x, op.cu_seqlens), y);
  return y;
}

Tensor recur(const GdnDecode<int64_t>& op, const Tensor& mixed, const Tensor& b, const Tensor& a) {
  const auto& s = op.shape;
  GatedDeltaRule<> rule;
  const auto heads = [&](int64_t first, int64_t count, int64_t size) {
    return mixed.narrow(-1, first, count * size).unflatten(-1, {count, size});
  };
  rule.q = heads(0, s.H, s.K);
  rule.k = heads(s.H * s.K, s.H, s.K);
  rule.v = heads(2 * s.H * s.K, s.HV, s.V);
  rule.g = a;
  rule.beta = b;
  rule.gates = op.gates;
  rule.use_qk_l2norm = true;
  rule.cu_seqlens = op.cu_seqlens;
  rule.shape = s;
  const Tensor o = at::empty({s.B, s.T, s.HV, s.V}, mixed.options());
  run_recurrence(rule, StateIo::in_place(s, op.pool, op.state_v_first), o);
  return o;
}

// An infinite gate would turn the zeros of a sequence without a slot into NaN.
void leave_zeros(const GdnDecode<int64_t>& op, const Tensor& y) {
  const auto slots = slots_of(op.shape.N, op.pool);
  const auto sequences = sequences_of(op.shape, op.cu_seqlens);
  for (size_t n = 0; n < slots.size(); ++n) {
    const auto& [batch, first, length] = sequences[n];
    if (slots[n].index < 0) y.select(0, batch).narrow(0, first, length).zero_();
  }
}

void run(const GdnDecode<int64_t>& op, const Tensor& output) {
  if (op.shape.N == 0) return;
  const auto [x, z, b, a] = projections_of(op);
  RmsNormGated<int64_t> norm;
  norm.x = recur(op, convolve(op, x), b, a);
  norm.g = z;
  norm.weight = op.norm_weight;
  norm.activation = op.norm_activation;
  norm.eps = op.norm_eps;
  norm.round_norm = op.round_norm;
  norm.D = op.shape.V;
  const Tensor y = op.out.value_or(output);
  const Tensor rows = y.is_contiguous() ? y : at::empty(y.sizes(), y.options());
  rms_norm_gated(norm, rows);
  leave_zeros(op, rows);
  if (!rows.is_same(y)) y.copy_(rows);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { define<GdnDecode, &run>(m); }

}  // namespace torch_gdn::cpu
