#include <torch/library.h>

#include <cmath>

#include "gates.h"

namespace torch_gdn {
namespace {

// Columns of V are independent of each other: one piece of work is kColumns of them for one sequence and head, whose
// state (at most 32 KB) stays in the first-level cache for the whole sequence. Tokens are converted kTokens at a time.
constexpr int64_t kColumns = 32, kTokens = 16;

struct Piece {
  alignas(64) float state[kLargestK * kColumns];
  alignas(64) float q[kTokens * kLargestK], k[kTokens * kLargestK];
  alignas(64) float v[kTokens * kColumns], o[kTokens * kColumns];
  float g[kTokens];
  alignas(64) float beta[kTokens * kColumns];                         // of each column
  alignas(64) float gk[kTokens * kLargestK], gv[kTokens * kColumns];  // where there are any
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

// A decay as two factors, S <- base S + change S, for the reason above.
struct Decay {
  explicit Decay(float g) : base(std::exp(g) > 0.5f), change(base > 0 ? std::expm1(g) : std::exp(g)) {}
  float base, change;
};

TORCH_GDN_VECTORISED void decay_channels(float* state, const float* gk, const float* gv, int64_t K) {
  alignas(64) float base[kColumns], change[kColumns];
  for (int64_t j = 0; j < kColumns; ++j) {
    const Decay decay(gv[j]);
    base[j] = decay.base;
    change[j] = decay.change;
  }
  for (int64_t i = 0; i < K; ++i) {
    const Decay key(gk[i]);
#pragma omp simd
    for (int64_t j = 0; j < kColumns; ++j) {
      float& value = state[i * kColumns + j];
      value = key.base * value + key.change * value;
      value = base[j] * value + change[j] * value;
    }
  }
}

void step(Piece& piece, int64_t token, int64_t K, float scale, bool has_channels) {
  const float *q = piece.q + token * K, *k = piece.k + token * K, *v = piece.v + token * kColumns;
  const float* beta = piece.beta + token * kColumns;
  float* o = piece.o + token * kColumns;
  const float g = piece.g[token], decay = std::exp(g);
  alignas(64) float read[kColumns], u[kColumns];
  if (has_channels) decay_channels(piece.state, piece.gk + token * K, piece.gv + token * kColumns, K);
  dot_columns(piece.state, k, K, read);
  for (int64_t j = 0; j < kColumns; ++j) u[j] = beta[j] * (v[j] - decay * read[j]);
  decay_and_add(piece.state, g, k, u, K);
  dot_columns(piece.state, q, K, o);
  for (int64_t j = 0; j < kColumns; ++j) o[j] *= scale;
}

struct Inputs {
  cpu::Rows q, k, v, g, beta;
  optional<cpu::Rows> gk, gv;
  bool has_vector_beta, normalise;

  bool has_channels() const { return gk.has_value() || gv.has_value(); }

  // `tokens` tokens of one head, as f32, into the piece of work.
  void read(const ChunkShape& s, Piece& piece, int64_t batch, int64_t first, int64_t tokens, int64_t head,
            int64_t column, int64_t columns) const {
    const int64_t key_head = cpu::key_head_of(s, head);
    for (int64_t i = 0; i < tokens; ++i) {
      q.read(batch, first + i, key_head, 0, s.K, piece.q + i * s.K);
      k.read(batch, first + i, key_head, 0, s.K, piece.k + i * s.K);
      v.read(batch, first + i, head, column, columns, piece.v + i * kColumns);
      piece.g[i] = g.value(batch, first + i, head);
      if (gk) gk->read(batch, first + i, head, 0, s.K, piece.gk + i * s.K);
      if (gv) gv->read(batch, first + i, head, column, columns, piece.gv + i * kColumns);
      float* steps = piece.beta + i * kColumns;
      if (has_vector_beta) {
        beta.read(batch, first + i, head, column, columns, steps);
      } else {
        std::fill(steps, steps + columns, beta.value(batch, first + i, head));
      }
    }
    if (normalise) {
      cpu::normalise_rows(piece.q, tokens, s.K, cpu::kNormEps);
      cpu::normalise_rows(piece.k, tokens, s.K, cpu::kNormEps);
    }
  }
};

optional<Tensor> rows_or_none(const optional<Tensor>& x, const char* name) {
  return x.has_value() ? unit_last_stride(cpu::as_activation(*x), name) : x;
}

struct Options {
  bool normalise;
  optional<double> scale;
};

void run_pieces(const ChunkShape& s, const Inputs& in, const std::vector<cpu::Sequence>& sequences, float scale,
                const cpu::StatePlaces& places, const Tensor& o) {
  const cpu::Rows out(o);
  const int64_t pieces = ceil_div(s.V, kColumns);
  at::parallel_for(0, s.N * s.HV * pieces, 1, [&](int64_t begin, int64_t end) {
    const auto piece = std::make_unique<Piece>();
    for (int64_t work = begin; work < end; ++work) {
      const int64_t column = work % pieces * kColumns, columns = std::min(kColumns, s.V - column);
      const int64_t head = work / pieces % s.HV, n = work / pieces / s.HV;
      const auto& [batch, first, length] = sequences[n];
      const bool has_slot = places.slots[n].index >= 0;
      std::fill(piece->state, piece->state + s.K * kColumns, 0.0f);
      std::fill(piece->v, piece->v + kTokens * kColumns, 0.0f);
      std::fill(piece->beta, piece->beta + kTokens * kColumns, 0.0f);
      std::fill(piece->o, piece->o + kTokens * kColumns, 0.0f);  // and stays so without a slot
      places.read(n, head, column, columns, s.K, piece->state, kColumns);
      for (int64_t t = first; t < first + length; t += kTokens) {
        const int64_t tokens = std::min(kTokens, first + length - t);
        if (has_slot) in.read(s, *piece, batch, t, tokens, head, column, columns);
        for (int64_t i = 0; i < tokens; ++i) {
          if (has_slot) step(*piece, i, s.K, scale, in.has_channels());
          out.write(batch, t + i, head, column, columns, piece->o + i * kColumns);
        }
      }
      places.write(n, head, column, columns, piece->state, kColumns);
    }
  });
}

Tensor run(const ChunkShape& s, const WholeOp& op, const Channels& channels, const cpu::StatePlaces& places,
           const optional<Tensor>& cu_seqlens, const Options& options) {
  const Tensor o = at::empty({s.B, s.T, s.HV, s.V}, op.q.options().dtype(output_dtype_of(op)));
  const Tensor q = unit_last_stride(op.q, "q"), k = unit_last_stride(op.k, "k"), v = unit_last_stride(op.v, "v");
  const Tensor decays = cpu::decays_of(s, op.g, op.gates), steps = cpu::steps_of(s, op.beta, op.gates);
  const auto gk = rows_or_none(channels.gk, "gk"), gv = rows_or_none(channels.gv, "gv");
  const Inputs in{.q = cpu::Rows(q),
                  .k = cpu::Rows(k),
                  .v = cpu::Rows(v),
                  .g = cpu::Rows(decays),
                  .beta = cpu::Rows(steps),
                  .gk = gk ? optional(cpu::Rows(*gk)) : std::nullopt,
                  .gv = gv ? optional(cpu::Rows(*gv)) : std::nullopt,
                  .has_vector_beta = steps.dim() == 4,
                  .normalise = options.normalise};
  const auto scale = static_cast<float>(scale_or_default(options.scale, s.K));
  run_pieces(s, in, cpu::sequences_of(s, cu_seqlens), scale, places, o);
  return o;
}

std::tuple<Tensor, Tensor> fused_recurrent_gated_delta_rule(
    const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& g, const optional<Tensor>& beta,
    optional<double> scale, const optional<Tensor>& initial_state, bool output_final_state,
    bool use_qk_l2norm_in_kernel, bool state_v_first, const optional<Tensor>& cu_seqlens, const optional<Tensor>& gk,
    const optional<Tensor>& gv, bool use_gate_in_kernel, const optional<Tensor>& A_log, const optional<Tensor>& dt_bias,
    bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, optional<at::ScalarType> output_dtype,
    std::string_view head_grouping) {
  const GateOptions gates{use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval};
  const Channels channels{gk, gv};
  const WholeOp op{"fused_recurrent_gated_delta_rule", q, k, v, g, beta, gates, output_dtype, head_grouping};
  const auto s = check_fused_recurrent_gated_delta_rule(op, channels, initial_state, state_v_first, cu_seqlens);
  const Tensor final_state = cpu::new_final_state(s, q, output_final_state, state_v_first);
  const auto places = cpu::StatePlaces::of_sequences(s, initial_state, final_state, state_v_first);
  return {run(s, op, channels, places, cu_seqlens, {use_qk_l2norm_in_kernel, scale}), final_state};
}

Tensor fused_recurrent_gated_delta_rule_(
    const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& g, const optional<Tensor>& beta,
    const Tensor& state_pool, const optional<Tensor>& state_indices, const optional<Tensor>& has_initial_state,
    int64_t null_index, optional<double> scale, bool use_qk_l2norm_in_kernel, bool state_v_first,
    const optional<Tensor>& cu_seqlens, const optional<Tensor>& gk, const optional<Tensor>& gv, bool use_gate_in_kernel,
    const optional<Tensor>& A_log, const optional<Tensor>& dt_bias, bool use_beta_sigmoid_in_kernel,
    bool allow_neg_eigval, optional<at::ScalarType> output_dtype, std::string_view head_grouping) {
  const GateOptions gates{use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval};
  const Channels channels{gk, gv};
  const Pool pool{state_pool, state_indices, has_initial_state, null_index, state_v_first};
  const WholeOp op{"fused_recurrent_gated_delta_rule_", q, k, v, g, beta, gates, output_dtype, head_grouping};
  const auto s = check_fused_recurrent_gated_delta_rule_(op, channels, pool, cu_seqlens);
  return run(s, op, channels, cpu::StatePlaces::in_place(s, pool), cu_seqlens, {use_qk_l2norm_in_kernel, scale});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) {
  m.impl("fused_recurrent_gated_delta_rule", &fused_recurrent_gated_delta_rule);
  m.impl("fused_recurrent_gated_delta_rule_", &fused_recurrent_gated_delta_rule_);
}

}  // namespace torch_gdn
