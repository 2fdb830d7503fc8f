#include <torch/library.h>

#include <cmath>

#include "common.h"

namespace torch_gdn {
namespace {

// Columns of V are independent of each other: one piece of work is kColumns of them for one sequence and head, whose
// state (at most 32 KB) stays in the first-level cache for the whole sequence. Tokens are converted kTokens at a time.
constexpr int64_t kColumns = 32, kTokens = 16;

struct Piece {
  alignas(64) float state[kLargestK * kColumns];
  alignas(64) float q[kTokens * kLargestK], k[kTokens * kLargestK];
  alignas(64) float v[kTokens * kColumns], o[kTokens * kColumns];
  float g[kTokens], beta[kTokens];
};

// Four partial sums: the adds of one do not wait for each other, and the rounding error of K terms is halved.
TORCH_GDN_VECTORISED void dot_columns(const float* state, const float* x, int64_t K, float* out) {
  alignas(64) float sums[4][kColumns] = {};
  int64_t i = 0;
  for (; i + 4 <= K; i += 4) {
    for (int64_t part = 0; part < 4; ++part) {
#pragma omp simd
      for (int64_t j = 0; j < kColumns; ++j) sums[part][j] += x[i + part] * state[(i + part) * kColumns + j];
    }
  }
  for (; i < K; ++i) {
#pragma omp simd
    for (int64_t j = 0; j < kColumns; ++j) sums[0][j] += x[i] * state[i * kColumns + j];
  }
#pragma omp simd
  for (int64_t j = 0; j < kColumns; ++j) out[j] = (sums[0][j] + sums[1][j]) + (sums[2][j] + sums[3][j]);
}

// S <- exp(g) S + k u^T. Over a thousand tokens with g = -1e-3 the rounding of exp(g), the same each time, adds up to
// 1e-6; a weak decay is therefore subtracted, as exp(g) - 1, which leaves 2e-7. A strong one must not be: it cancels.
TORCH_GDN_VECTORISED void decay_and_add(float* state, float g, const float* k, const float* u, int64_t K) {
  const float decay = std::exp(g), change = std::expm1(g);
  if (decay > 0.5f) {
    for (int64_t i = 0; i < K; ++i) {
#pragma omp simd
      for (int64_t j = 0; j < kColumns; ++j) {
        float& value = state[i * kColumns + j];
        value += change * value + k[i] * u[j];
      }
    }
    return;
  }
  for (int64_t i = 0; i < K; ++i) {
#pragma omp simd
    for (int64_t j = 0; j < kColumns; ++j) {
      state[i * kColumns + j] = decay * state[i * kColumns + j] + k[i] * u[j];
    }
  }
}

void step(Piece& piece, int64_t token, int64_t K, float scale) {
  const float *q = piece.q + token * K, *k = piece.k + token * K, *v = piece.v + token * kColumns;
  float* o = piece.o + token * kColumns;
  const float g = piece.g[token], decay = std::exp(g), beta = piece.beta[token];
  alignas(64) float read[kColumns], u[kColumns];
  dot_columns(piece.state, k, K, read);
  for (int64_t j = 0; j < kColumns; ++j) u[j] = beta * (v[j] - decay * read[j]);
  decay_and_add(piece.state, g, k, u, K);
  dot_columns(piece.state, q, K, o);
  for (int64_t j = 0; j < kColumns; ++j) o[j] *= scale;
}

struct Inputs {
  cpu::Rows q, k, v, g, beta;
  int64_t K, group;
  bool normalise;

  // `tokens` tokens of one head, as f32, into the piece of work.
  void read(Piece& piece, int64_t batch, int64_t first, int64_t tokens, int64_t head, int64_t column,
            int64_t columns) const {
    for (int64_t i = 0; i < tokens; ++i) {
      q.read(batch, first + i, head / group, 0, K, piece.q + i * K);
      k.read(batch, first + i, head / group, 0, K, piece.k + i * K);
      v.read(batch, first + i, head, column, columns, piece.v + i * kColumns);
      piece.g[i] = g.value(batch, first + i, head);
      piece.beta[i] = beta.value(batch, first + i, head);
    }
    if (normalise) {
      cpu::normalise_rows(piece.q, tokens, K, cpu::kNormEps);
      cpu::normalise_rows(piece.k, tokens, K, cpu::kNormEps);
    }
  }
};

std::tuple<Tensor, Tensor> fused_recurrent_gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v,
                                                            const Tensor& g, const Tensor& beta, optional<double> scale,
                                                            const optional<Tensor>& initial_state,
                                                            bool output_final_state, bool use_qk_l2norm_in_kernel,
                                                            bool state_v_first, const optional<Tensor>& cu_seqlens) {
  const auto s = check_fused_recurrent_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state,
                                                        use_qk_l2norm_in_kernel, state_v_first, cu_seqlens);
  Tensor o = at::empty({s.B, s.T, s.HV, s.V}, q.options());
  Tensor final_state = cpu::new_final_state(s, q, output_final_state, state_v_first);
  const Tensor q_unit = unit_last_stride(q, "q"), k_unit = unit_last_stride(k, "k"), v_unit = unit_last_stride(v, "v");
  const Tensor g_f32 = g.to(at::kFloat), beta_f32 = beta.to(at::kFloat);
  const Inputs in{cpu::Rows(q_unit), cpu::Rows(k_unit),      cpu::Rows(v_unit),
                  cpu::Rows(g_f32),  cpu::Rows(beta_f32),    s.K,
                  s.HV / s.H,        use_qk_l2norm_in_kernel};
  const cpu::Rows out(o);
  const auto sequences = cpu::sequences_of(s, cu_seqlens);
  const auto factor = static_cast<float>(scale_or_default(scale, s.K));
  const int64_t pieces = ceil_div(s.V, kColumns);

  at::parallel_for(0, s.N * s.HV * pieces, 1, [&](int64_t begin, int64_t end) {
    const auto piece = std::make_unique<Piece>();
    for (int64_t work = begin; work < end; ++work) {
      const int64_t column = work % pieces * kColumns, columns = std::min(kColumns, s.V - column);
      const int64_t head = work / pieces % s.HV, n = work / pieces / s.HV;
      const auto& [batch, first, length] = sequences[n];
      std::fill(piece->state, piece->state + s.K * kColumns, 0.0f);
      std::fill(piece->v, piece->v + kTokens * kColumns, 0.0f);
      if (initial_state) {
        cpu::States(*initial_state, state_v_first).read(0, n, head, column, columns, piece->state, kColumns);
      }
      for (int64_t t = first; t < first + length; t += kTokens) {
        const int64_t tokens = std::min(kTokens, first + length - t);
        in.read(*piece, batch, t, tokens, head, column, columns);
        for (int64_t i = 0; i < tokens; ++i) {
          step(*piece, i, s.K, factor);
          out.write(batch, t + i, head, column, columns, piece->o + i * kColumns);
        }
      }
      if (output_final_state) {
        cpu::States(final_state, state_v_first).write(0, n, head, column, columns, piece->state, kColumns);
      }
    }
  });
  return {o, final_state};
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) { m.impl("fused_recurrent_gated_delta_rule", &fused_recurrent_gated_delta_rule); }

}  // namespace torch_gdn
