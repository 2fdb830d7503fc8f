// Computes the gradients of y = n * weight * act(gate), where n = x * rstd is the normalised row:
//     dn = dy * weight * act(gate)   dx = rstd * (dn - n * sum(dn * n) / count) + dh
//     dgate = dy * n * weight * act'(gate)   dweight = sum over rows of dy * n * act(gate)
// A threadgroup takes some rows, one after the other. Its threads cover the D elements in turn, `Width` neighbours at a
// time.
// Registers: a thread's elements of n, dn, the weight and its gradient, in f32.
// Layout: dy, x, gate and dh [B, T, H, D] with row strides; dx and dgate contiguous; partials [threadgroups, D], which
// sum_partials adds up.
#include "core/gates.h"
#include "core/rows.h"
#include "core/vectors.h"
#include "layers/parameters.h"
#include "layers/threadgroup_sum.h"

template <typename T, typename Gate, typename Weight, int D, int Width>
[[kernel]] void norm_bwd(
    device const T* dy [[buffer(0)]],
    device const T* x [[buffer(1)]],
    device const Weight* weight [[buffer(2)]],
    device const Gate* gate [[buffer(3)]],
    device const T* dh [[buffer(4)]],
    device T* dx [[buffer(5)]],
    device Gate* dgate [[buffer(6)]],
    device float* partials [[buffer(7)]],
    constant NormBwdParameters& parameters [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(D >= 1 && D <= kNormBwdLargestRow && D % Width == 0, "D is at most 12288, in whole vectors");
  constexpr int kThreads = norm_bwd_threads(D);
  constexpr int kOwn = (D / Width + kThreads - 1) / kThreads;
  // Aligned, so that a compiler which joins the loads of one array does not read the other.
  alignas(16) threadgroup float squares_of[kThreads / 32];
  alignas(16) threadgroup float products_of[kThreads / 32];

  Values<Width> factor[kOwn], dweight[kOwn];
  UNROLL for (int own = 0; own < kOwn; ++own) {
    const int column = (own * kThreads + int(thread_index)) * Width;
    const bool is_read = parameters.has_weight != 0 && column < D;
    const Values<Width> loaded = is_read ? load_values<Width>(weight + column) : no_values<Width>();
    const float added = is_read && parameters.zero_centered == 0 ? 0.0f : 1.0f;
    UNROLL for (int i = 0; i < Width; ++i) factor[own].at[i] = loaded.at[i] + added;
    dweight[own] = no_values<Width>();
  }

  const int64_t first = int64_t(group.x) * parameters.rows_of_group;
  const int64_t last = min(first + parameters.rows_of_group, int64_t(parameters.rows));
  for (int64_t row = first; row < last; ++row) {
    const RowIndex at = row_index(row, parameters.rows, parameters.tokens, parameters.heads);
    device const T* inputs = x + offset_of(parameters.x, at);
    device const T* gradients = dy + offset_of(parameters.dy, at);
    device const Gate* logits = gate + offset_of(parameters.gate, at);
    device const T* added = dh + offset_of(parameters.dh, at);
    const int64_t target = row * D;

    Values<Width> normed[kOwn], dnormed[kOwn];
    float squares = 0.0f, products = 0.0f;
    UNROLL for (int own = 0; own < kOwn; ++own) {
      const int column = (own * kThreads + int(thread_index)) * Width;
      normed[own] = column < D ? load_values<Width>(inputs + column) : no_values<Width>();
      UNROLL for (int i = 0; i < Width; ++i) squares += normed[own].at[i] * normed[own].at[i];
    }
    const float rstd =
        rsqrt(threadgroup_sum<kThreads>(squares, squares_of, lane, simdgroup) / parameters.count + parameters.eps);
    UNROLL for (int own = 0; own < kOwn; ++own) {
      const int column = (own * kThreads + int(thread_index)) * Width;
      UNROLL for (int i = 0; i < Width; ++i) normed[own].at[i] *= rstd;
      Values<Width> dproduct = column < D ? load_values<Width>(gradients + column) : no_values<Width>();
      if (parameters.has_gate != 0 && column < D) {
        const Values<Width> logit = load_values<Width>(logits + column);
        Values<Width> dlogit;
        UNROLL for (int i = 0; i < Width; ++i) {
          const float opened = sigmoid_of(logit.at[i]), closed = sigmoid_of(-logit.at[i]);
          const bool has_sigmoid = parameters.has_sigmoid != 0;
          const float slope = has_sigmoid ? opened * closed : opened * (1.0f + logit.at[i] * closed);
          dlogit.at[i] = dproduct.at[i] * normed[own].at[i] * factor[own].at[i] * slope;
          dproduct.at[i] *= has_sigmoid ? opened : opened * logit.at[i];
        }
        store_values(dgate + target + column, dlogit);
      }
      UNROLL for (int i = 0; i < Width; ++i) {
        dweight[own].at[i] += dproduct.at[i] * normed[own].at[i];
        dnormed[own].at[i] = dproduct.at[i] * factor[own].at[i];
        products += dnormed[own].at[i] * normed[own].at[i];
      }
    }
    const float mean = threadgroup_sum<kThreads>(products, products_of, lane, simdgroup) / parameters.count;
    UNROLL for (int own = 0; own < kOwn; ++own) {
      const int column = (own * kThreads + int(thread_index)) * Width;
      if (column < D) {
        Values<Width> result = parameters.has_dh != 0 ? load_values<Width>(added + column) : no_values<Width>();
        UNROLL for (int i = 0; i < Width; ++i) {
          result.at[i] += rstd * (dnormed[own].at[i] - normed[own].at[i] * mean);
        }
        store_values(dx + target + column, result);
      }
    }
  }
  UNROLL for (int own = 0; own < kOwn; ++own) {
    const int column = (own * kThreads + int(thread_index)) * Width;
    if (parameters.has_dweight != 0 && column < D) {
      store_values(partials + int64_t(group.x) * D + column, dweight[own]);
    }
  }
}
