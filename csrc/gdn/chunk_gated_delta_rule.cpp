// The six stages in one op, encoded at once; the intermediates live in PyTorch's allocator and die when it returns.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "launches.h"

namespace torch_gdn {

namespace {

std::tuple<Tensor, Tensor> chunk_gated_delta_rule(const Tensor& q_any, const Tensor& k_any, const Tensor& v_any,
                                                  const Tensor& g, const Tensor& beta, optional<double> scale,
                                                  const optional<Tensor>& initial_state, bool output_final_state,
                                                  bool use_qk_l2norm_in_kernel, bool state_v_first,
                                                  const optional<Tensor>& cu_seqlens,
                                                  const optional<Tensor>& chunk_indices, int64_t chunk_size) {
  const auto shape =
      check_chunk_gated_delta_rule(q_any, k_any, v_any, g, beta, scale, initial_state, output_final_state,
                                   use_qk_l2norm_in_kernel, state_v_first, cu_seqlens, chunk_indices, chunk_size);
  auto q = unit_last_stride(q_any, "q"), k = unit_last_stride(k_any, "k");
  const auto v = unit_last_stride(v_any, "v");
  const auto activation = q.options(), f32 = q.options().dtype(at::kFloat);
  const auto o = at::empty({shape.B, shape.T, shape.HV, shape.V}, activation);
  if (shape.T == 0) {
    return {o, output_final_state ? copied_state(shape, q, initial_state, state_v_first) : at::empty({0}, f32)};
  }

  std::vector<Launch> launches;
  if (use_qk_l2norm_in_kernel) {
    const auto unit_q = at::empty(q.sizes(), activation), unit_k = at::empty(k.sizes(), activation);
    launches.push_back(launch_l2norm(q, 1e-6, unit_q));
    launches.push_back(launch_l2norm(k, 1e-6, unit_k));
    q = unit_q;
    k = unit_k;
  }
  const auto gates = as_f32(g), steps = as_f32(beta);
  const auto bounds = sequence_bounds(cu_seqlens, q.device());
  const auto g_cumsum = at::empty({shape.B, shape.T, shape.HV}, f32);
  const auto A = at::empty({shape.B, shape.T, shape.HV, shape.C}, f32), A_inv = at::empty_like(A);
  // A state may leave half's range, so with half the stages between are f32.
  const auto between = q.scalar_type() == at::kHalf ? f32 : activation;
  const auto w = at::empty({shape.B, shape.T, shape.HV, shape.K}, between);
  const auto u = at::empty({shape.B, shape.T, shape.HV, shape.V}, between), v_new = at::empty_like(u);
  const int64_t rows = state_v_first ? shape.V : shape.K, columns = state_v_first ? shape.K : shape.V;
  const auto h = at::empty({shape.B, shape.NT, shape.HV, rows, columns}, between);
  const auto final_state = output_final_state ? empty_state(shape, q, state_v_first) : Tensor();

  launches.push_back(launch_chunk_local_cumsum(shape, gates, bounds, g_cumsum));
  launches.push_back(launch_chunk_scaled_dot_kkt(shape, k, g_cumsum, steps, bounds, A));
  launches.push_back(launch_solve_tril(shape, A, bounds, A_inv));
  launches.push_back(launch_recompute_w_u(shape, k, v, steps, A_inv, g_cumsum, bounds, w, u));
  launches.push_back(
      launch_chunk_fwd_h(shape, k, w, u, g_cumsum, initial_state, state_v_first, bounds, h, v_new, final_state));
  launches.push_back(
      launch_chunk_fwd_o(shape, q, k, v_new, h, g_cumsum, scale_or_default(scale, shape.K), state_v_first, bounds, o));
  launcher().run(launches);
  return {o, final_state.defined() ? final_state : at::empty({0}, f32)};
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("chunk_gated_delta_rule", chunk_gated_delta_rule); }

}  // namespace torch_gdn
