#include "cpu/gates.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/ones.h>

#include <cmath>
#include <vector>

namespace torch_gdn::cpu {

namespace {

// Returns the elements in order. Decoding has few elements, and x.to(at::kDouble) takes 2 us for a single one, so this
// has its own loop.
std::vector<double> values_of(const Tensor& x_any) {
  const bool is_narrow = x_any.element_size() == 1;  // 8-bit floats
  const Tensor x = (is_narrow ? x_any.to(at::kFloat) : x_any).contiguous();
  std::vector<double> values(x.numel());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "values_of", [&] {
    const auto* from = x.const_data_ptr<scalar_t>();
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(from[i]);
  });
  return values;
}

// Returns f(i, x[i]) for each element of x. f is computed in f64, and its result is rounded once to f32.
template <typename F>
Tensor transformed(const Tensor& x, const F& f) {
  const Tensor out = at::empty(x.sizes(), x.options().dtype(at::kFloat));
  const auto from = values_of(x);
  auto* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, x.numel(), 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = static_cast<float>(f(i, from[i]));
  });
  return out;
}

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

std::vector<float> floats_of(const Tensor& x) {
  const Tensor values = x.to(at::kFloat).contiguous();
  const auto* first = values.const_data_ptr<float>();
  return {first, first + values.numel()};
}

}  // namespace

Tensor log_decays_of(const ChunkShape<>& s, const optional<Tensor>& g, const GateOptions& options) {
  if (!g.has_value()) return at::zeros({s.B, s.T, s.HV}, at::TensorOptions().dtype(at::kFloat));
  if (!options.use_gate) return g->to(at::kFloat);
  auto factors = values_of(*options.A_log);
  for (double& factor : factors) factor = std::exp(factor);
  const auto biases = options.dt_bias.has_value() ? values_of(*options.dt_bias) : std::vector<double>(factors.size());
  return transformed(*g, [&](int64_t i, double x) { return -factors[i % s.HV] * softplus(x + biases[i % s.HV]); });
}

Tensor betas_of(const ChunkShape<>& s, const optional<Tensor>& beta, const GateOptions& options) {
  if (!beta.has_value()) return at::ones({s.B, s.T, s.HV}, at::TensorOptions().dtype(at::kFloat));
  if (!options.use_beta_sigmoid) return beta->to(at::kFloat);
  const double beta_scale = options.allow_neg_eigval ? 2.0 : 1.0;
  return transformed(*beta, [&](int64_t, double x) { return beta_scale / (1.0 + std::exp(-x)); });
}

ChannelGateValues::ChannelGateValues(int64_t HV, int64_t K, const ChannelGateOptions& options)
    : K_(K), use_gate_(options.use_gate), lower_bound_(static_cast<float>(options.lower_bound.value_or(0))) {
  if (!use_gate_) return;
  rates_ = options.A_log.has_value() ? floats_of(*options.A_log) : std::vector<float>(HV);
  for (float& rate : rates_) rate = std::exp(rate);
  if (!options.dt_bias.has_value()) return;
  const auto biases = floats_of(*options.dt_bias);
  biases_.resize(HV * padded_channels(K));
  for (int64_t head = 0; head < HV; ++head) {
    std::copy_n(biases.begin() + head * K, K, biases_.begin() + head * padded_channels(K));
  }
}

Gates ChannelGateValues::for_head(int64_t head, const HeadRows& g) const {
  return {.g = g,
          .width = K_,
          .gate = use_gate_,
          .rate = use_gate_ ? rates_[head] : 1.0f,
          .lower_bound = lower_bound_,
          .bias = biases_.empty() ? nullptr : biases_.data() + head * padded_channels(K_)};
}

void write_channel_decays(const Tensor& g, const ChannelGateOptions& options, const Tensor& out) {
  const int64_t T = g.size(1), HV = g.size(2), K = g.size(3);
  const Rows from(as_activation(g), "g"), to(out);
  const ChannelGateValues gates(HV, K, options);
  const auto& kernels = channel_kernels();
  constexpr int64_t kGatesOfThread = 4096;
  at::parallel_for(
      0, g.size(0) * T * HV, ceil_div(kGatesOfThread, std::max<int64_t>(1, K)), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t head = i % HV, token = i / HV % T, batch = i / HV / T;
          kernels.write_log_decays(gates.for_head(head, from.head(batch, token, head)), to.head(batch, token, head));
        }
      });
}

Tensor channel_decays_of(const Tensor& g, const ChannelGateOptions& options) {
  if (!options.use_gate) return g;
  const Tensor log_decays = at::empty(g.sizes(), g.options().dtype(at::kFloat));
  write_channel_decays(g, options, log_decays);
  return log_decays;
}

}  // namespace torch_gdn::cpu
