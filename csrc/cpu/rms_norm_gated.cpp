#include "../checks/rms_norm_gated.h"

#include <torch/library.h>

#include <cmath>

#include "common.h"
#include "convert.h"
#include "exponential.h"

namespace torch_gdn {
namespace {

constexpr int64_t kElements = 4096;  // of some rows, which are worked on together: 32 KB of x and gate

struct Rows {
  alignas(64) float x[kElements], gate[kElements];
};

TORCH_GDN_VECTORISED void normalise(float* x, int64_t rows, int64_t D, float eps) {
  for (int64_t row = 0; row < rows; ++row, x += D) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < D; ++i) sum += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(D) + eps);
#pragma omp simd
    for (int64_t i = 0; i < D; ++i) x[i] *= scale;
  }
}

TORCH_GDN_VECTORISED void multiply_rows(float* x, const float* weight, int64_t rows, int64_t D) {
  for (int64_t row = 0; row < rows; ++row, x += D) {
#pragma omp simd
    for (int64_t i = 0; i < D; ++i) x[i] *= weight[i];
  }
}

TORCH_GDN_VECTORISED void open_gate(float* x, const float* gate, int64_t count, bool sigmoid) {
  if (sigmoid) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) x[i] = x[i] / (1.0f + cpu::exponential(-gate[i]));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) x[i] = x[i] * (gate[i] / (1.0f + cpu::exponential(-gate[i])));
  }
}

// Rows of a tensor [..., D] in order, with whatever strides it has; more than 4 dimensions were made contiguous.
class RowsOf {
 public:
  explicit RowsOf(const Tensor& x)
      : rows_(x), tokens_(x.size(1)), heads_(x.size(2)), D_(x.size(3)), whole_(x.is_contiguous()) {}

  void read(int64_t first, int64_t count, float* out) const {
    if (whole_) return rows_.read(0, 0, 0, first * D_, count * D_, out);
    for (int64_t row = first; row < first + count; ++row, out += D_) {
      rows_.read(row / heads_ / tokens_, row / heads_ % tokens_, row % heads_, 0, D_, out);
    }
  }

  void write(int64_t first, int64_t count, const float* in) const {
    rows_.write(0, 0, 0, first * D_, count * D_, in);  // an output is contiguous
  }

 private:
  cpu::Rows rows_;
  int64_t tokens_, heads_, D_;
  bool whole_;
};

Tensor four_dimensions(const Tensor& x_any, const char* name) {
  Tensor x = unit_last_stride(x_any, name);
  while (x.dim() < 4) x = x.unsqueeze(0);
  return x.dim() > 4 ? x.reshape({1, -1, 1, x.size(-1)}) : x;
}

Tensor rms_norm_gated(const Tensor& x_any, const Tensor& g_any, const optional<Tensor>& weight, double eps,
                      c10::string_view activation, bool round_norm) {
  const auto shape = check_rms_norm_gated(x_any, g_any, weight, eps, activation, round_norm);
  const Tensor y = at::empty(x_any.sizes(), x_any.options());
  if (shape.rows == 0) return y;
  const auto dtype = y.scalar_type();
  const int64_t D = shape.D, at_once = kElements / D;
  const Tensor x = four_dimensions(x_any, "x"), g = four_dimensions(g_any, "g"), y_rows = y.view({1, -1, 1, D});
  const Tensor factor = weight.has_value() ? weight->to(at::kFloat).contiguous() : Tensor();
  const RowsOf in(x), gates(g), out(y_rows);
  at::parallel_for(0, ceil_div(shape.rows, at_once), 4, [&](int64_t begin, int64_t end) {
    const auto rows = std::make_unique<Rows>();
    for (int64_t first = begin * at_once; first < std::min(end * at_once, shape.rows); first += at_once) {
      const int64_t count = std::min(at_once, shape.rows - first);
      in.read(first, count, rows->x);
      gates.read(first, count, rows->gate);
      normalise(rows->x, count, D, static_cast<float>(eps));
      if (round_norm) cpu::round_to(dtype, rows->x, count * D);
      if (factor.defined()) multiply_rows(rows->x, factor.const_data_ptr<float>(), count, D);
      if (shape.round_product) cpu::round_to(dtype, rows->x, count * D);
      open_gate(rows->x, rows->gate, count * D, shape.sigmoid);
      out.write(first, count, rows->x);
    }
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) { m.impl("rms_norm_gated", &rms_norm_gated); }

}  // namespace torch_gdn
