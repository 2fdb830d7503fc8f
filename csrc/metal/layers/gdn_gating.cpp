#include "ops/layers/gdn_gating.h"

#include "metal/gates.h"
#include "metal/implement.h"
#include "shaders/layers/gdn_gating.h"

namespace torch_gdn {

namespace {

constexpr int64_t kThreads = 256;

// Returns x as [B, T, HV]. A tensor with more dimensions is made contiguous.
Tensor as_tokens(const Tensor& x) {
  if (x.dim() > 3) return x.reshape({1, -1, x.size(-1)});
  Tensor tokens = x;
  while (tokens.dim() < 3) tokens = tokens.unsqueeze(0);
  return tokens;
}

void run(const GdnGating<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [g, beta] = outputs;
  const int64_t count = g.numel();
  if (count == 0) return;
  const Tensor a = as_tokens(op.a);
  const Gates gates = gates_of(a, as_tokens(op.b),
                               {.use_gate = true,
                                .A_log = op.A_log,
                                .dt_bias = op.dt_bias,
                                .use_beta_sigmoid = true,
                                .allow_neg_eigval = op.allow_neg_eigval});
  const GdnGatingParameters parameters{gates.parameters, int32_count(count, "gdn_gating: a", "elements"),
                                       int32_t(a.size(1)), int32_t(op.HV)};
  launcher().run({{"layers/gdn_gating",
                   {kThreads},
                   {*gates.g, *gates.beta, *gates.A_log, gates.dt_bias, g, beta, parameters},
                   {ceil_div(count, kThreads), 1, 1},
                   kThreads}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<GdnGating, &run>(m); }

}  // namespace torch_gdn
