#include <torch/library.h>

#include <cmath>
#include <limits>

#include "cpu/aura/aura_flash.h"

namespace torch_gdn {
namespace cpu {
namespace {

struct Merged {
  float largest, sum, mean;
};

// The blocks of one row: their factors exp(m - largest), and l and mean with these. A sink is a score without a value.
Merged merge(const Partials& partials, int64_t at, int64_t blocks, const float* sink, std::vector<float>& factors) {
  const float* m = partials.m.const_data_ptr<float>() + at;
  const float* l = partials.l.const_data_ptr<float>() + at;
  Merged merged{sink != nullptr ? *sink : -std::numeric_limits<float>::infinity(), 0.0f, 0.0f};
  for (int64_t i = 0; i < blocks; ++i) merged.largest = std::max(merged.largest, m[i]);
  for (int64_t i = 0; i < blocks; ++i) {
    factors[i] = l[i] == 0.0f ? 0.0f : std::exp(m[i] - merged.largest);
    merged.sum += factors[i] * l[i];
    if (partials.mean.numel() > 0) merged.mean += factors[i] * partials.mean.const_data_ptr<float>()[at + i];
  }
  if (sink != nullptr) merged.sum += std::exp(*sink - merged.largest);
  return merged;
}

}  // namespace

void flash_p2(const AuraShape& s, const Partials& partials, const Tensor& value_signs, const optional<Tensor>& sinks,
              const Tensor& o) {
  if (o.numel() == 0) return;
  const Rows out(o);
  const Tensor signs = value_signs.contiguous();
  const Tensor sink_row = sinks.has_value() ? sinks->contiguous() : Tensor();
  at::parallel_for(0, s.B * s.HQ * s.L, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> row(s.D), factors(s.NB);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / s.L % s.HQ;
      const float* sink = sink_row.defined() ? sink_row.const_data_ptr<float>() + head : nullptr;
      const auto merged = merge(partials, i * s.NB, s.NB, sink, factors);
      std::fill(row.begin(), row.end(), 0.0f);
      for (int64_t block = 0; block < s.NB; ++block) {
        if (factors[block] == 0.0f) continue;
        const float* part = partials.o.const_data_ptr<float>() + (i * s.NB + block) * s.D;
        for (int64_t d = 0; d < s.D; ++d) row[d] += factors[block] * part[d];
      }
      rotate(row.data(), signs.const_data_ptr<float>(), s.D, true);
      const float inverse = merged.sum == 0.0f ? 0.0f : 1.0f / merged.sum;  // no key was seen: 0
      const float factor = inverse / std::sqrt(static_cast<float>(s.D));
      for (float& x : row) x = x * factor + merged.mean * inverse;
      out.write(i / s.L / s.HQ, head, i % s.L, 0, s.D, row.data());
    }
  });
}

}  // namespace cpu

namespace {

Tensor aura_flash_p2(const Tensor& o_partials, const Tensor& m_partials, const Tensor& l_partials,
                     const Tensor& value_signs, const optional<Tensor>& mean_partials, const optional<Tensor>& sinks,
                     optional<at::ScalarType> dtype) {
  const auto s = check_aura_flash_p2(o_partials, m_partials, l_partials, value_signs, mean_partials, sinks, dtype);
  const Tensor o = at::empty({s.B, s.HQ, s.L, s.D}, o_partials.options().dtype(dtype.value_or(at::kFloat)));
  const Tensor mean = mean_partials.has_value() ? mean_partials->contiguous() : at::empty({0}, o_partials.options());
  cpu::flash_p2(s, {o_partials.contiguous(), m_partials.contiguous(), l_partials.contiguous(), mean}, value_signs,
                sinks, o);
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) { m.impl("aura_flash_p2", &aura_flash_p2); }

}  // namespace torch_gdn
