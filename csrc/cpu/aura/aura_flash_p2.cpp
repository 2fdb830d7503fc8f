#include <cmath>
#include <limits>

#include "cpu/aura/aura_flash.h"
#include "cpu/aura/rotation.h"
#include "cpu/aura/vectors.h"
#include "cpu/common.h"
#include "cpu/define.h"

namespace torch_gdn::cpu {

namespace {

// Sets the factor of each block of a row, exp(m - the largest m). Returns the sum of l, each times its block's factor.
// A sink is a score without a value.
float merge(const float* m, const float* l, const float* sink, std::vector<float>& factors) {
  float largest = sink != nullptr ? *sink : -std::numeric_limits<float>::infinity(), sum = 0;
  for (size_t i = 0; i < factors.size(); ++i) largest = std::max(largest, m[i]);
  for (size_t i = 0; i < factors.size(); ++i) {
    factors[i] = l[i] == 0.0f ? 0.0f : std::exp(m[i] - largest);
    sum += factors[i] * l[i];
  }
  if (sink != nullptr) sum += std::exp(*sink - largest);
  return sum;
}

}  // namespace

void flash_p2(const AuraFlashP2<int64_t>& op, const Tensor& o) {
  if (o.numel() == 0) return;
  const auto& s = op.shape;
  const Tensor parts = op.o_partials.contiguous(), m = op.m_partials.contiguous(), l = op.l_partials.contiguous();
  const Tensor sinks = op.sinks.has_value() ? op.sinks->contiguous() : Tensor();
  const Tensor signs = op.value_signs.contiguous();
  const Rows out(o);
  const int64_t blocks = s.NB + s.NX;
  const float factor = 1.0f / std::sqrt(static_cast<float>(s.D));
  at::parallel_for(0, s.B * s.HQ * s.L, 16, [&](int64_t begin, int64_t end) {
    float row[kLargestD];
    std::vector<float> factors(blocks);
    const auto add_blocks = [&](int64_t at, int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        if (factors[block] == 0.0f) continue;
        const float* part = parts.const_data_ptr<float>() + (at + block) * s.D;
        for (int64_t d = 0; d < s.D; ++d) row[d] += factors[block] * part[d];
      }
    };
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / s.L % s.HQ, at = i * blocks;
      const float sum = merge(m.const_data_ptr<float>() + at, l.const_data_ptr<float>() + at,
                              sinks.defined() ? sinks.const_data_ptr<float>() + head : nullptr, factors);
      std::fill_n(row, s.D, 0.0f);
      add_blocks(at, 0, s.NB);
      rotate(row, signs.const_data_ptr<float>(), s.D, true);
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // a row that saw no key has the result 0
      for (int64_t d = 0; d < s.D; ++d) row[d] *= factor;
      add_blocks(at, s.NB, blocks);
      for (int64_t d = 0; d < s.D; ++d) row[d] *= inverse;
      out.write(i / s.L / s.HQ, head, i % s.L, 0, s.D, row);
    }
  });
}

TORCH_LIBRARY_FRAGMENT(gdn, m) { define<AuraFlashP2, &flash_p2>(m); }

}  // namespace torch_gdn::cpu
