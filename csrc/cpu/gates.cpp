#include "gates.h"

#include <ATen/ops/exp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

namespace torch_gdn::cpu {

namespace {

// f(i, x[i]) for all of x, as f64 rounded once to f32.
template <typename F>
Tensor transformed(const Tensor& x, const F& f) {
  const Tensor out = at::empty(x.sizes(), x.options().dtype(at::kFloat)), in = x.to(at::kDouble).contiguous();
  const auto* from = in.const_data_ptr<double>();
  auto* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, x.numel(), 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = static_cast<float>(f(i, from[i]));
  });
  return out;
}

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

}  // namespace

Tensor decays_of(const ChunkShape& s, const optional<Tensor>& g, const GateOptions& options) {
  if (!g.has_value()) return at::zeros({s.B, s.T, s.HV}, at::TensorOptions().dtype(at::kFloat));
  if (!options.use_gate) return g->to(at::kFloat);
  const Tensor factor = options.A_log->to(at::kDouble).exp();
  const Tensor bias = options.dt_bias.has_value() ? options.dt_bias->to(at::kDouble) : at::zeros_like(factor);
  const auto factors = factor.accessor<double, 1>(), biases = bias.accessor<double, 1>();
  return transformed(*g, [&](int64_t i, double x) { return -factors[i % s.HV] * softplus(x + biases[i % s.HV]); });
}

Tensor steps_of(const ChunkShape& s, const optional<Tensor>& beta, const GateOptions& options) {
  if (!beta.has_value()) return at::ones({s.B, s.T, s.HV}, at::TensorOptions().dtype(at::kFloat));
  if (!options.use_sigmoid) {
    const Tensor steps = beta->to(at::kFloat);
    return steps.dim() == 4 ? unit_last_stride(steps, "beta") : steps;
  }
  const double largest = options.allow_neg_eigval ? 2.0 : 1.0;
  return transformed(*beta, [&](int64_t, double x) { return largest / (1.0 + std::exp(-x)); });
}

}  // namespace torch_gdn::cpu
