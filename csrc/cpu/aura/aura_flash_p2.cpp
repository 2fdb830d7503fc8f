#include <cmath>
#include <limits>

#include "cpu/aura/aura_flash.h"
#include "cpu/aura/rotation.h"
#include "cpu/aura/vectors.h"
#include "cpu/common.h"
#include "cpu/define.h"

namespace torch_gdn::cpu {

namespace {

// A row's m, l and mean, with `blocks` values each. `mean` may be nullptr.
struct RowPartials {
  const float *m, *l, *mean;
  int64_t blocks;
};

struct Merged {
  float largest, sum, mean;
};

// A block's factor is exp(m - largest). `sum` and `mean` add l and mean, each times its block's factor. A sink is a
// score without a value.
Merged merge(const RowPartials& row, const float* sink, std::vector<float>& factors) {
  Merged merged{sink != nullptr ? *sink : -std::numeric_limits<float>::infinity(), 0.0f, 0.0f};
  for (int64_t i = 0; i < row.blocks; ++i) merged.largest = std::max(merged.largest, row.m[i]);
  for (int64_t i = 0; i < row.blocks; ++i) {
    factors[i] = row.l[i] == 0.0f ? 0.0f : std::exp(row.m[i] - merged.largest);
    merged.sum += factors[i] * row.l[i];
    if (row.mean != nullptr) merged.mean += factors[i] * row.mean[i];
  }
  if (sink != nullptr) merged.sum += std::exp(*sink - merged.largest);
  return merged;
}

}  // namespace

void flash_p2(const AuraFlashP2<int64_t>& op, const Tensor& o) {
  if (o.numel() == 0) return;
  const auto& s = op.shape;
  const Tensor parts = op.o_partials.contiguous(), m = op.m_partials.contiguous(), l = op.l_partials.contiguous();
  const Tensor mean = op.mean_partials.has_value() ? op.mean_partials->contiguous() : Tensor();
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
      const RowPartials partials{m.const_data_ptr<float>() + at, l.const_data_ptr<float>() + at,
                                 mean.defined() ? mean.const_data_ptr<float>() + at : nullptr, blocks};
      const auto merged = merge(partials, sinks.defined() ? sinks.const_data_ptr<float>() + head : nullptr, factors);
      std::fill_n(row, s.D, 0.0f);
      add_blocks(at, 0, s.NB);
      rotate(row, signs.const_data_ptr<float>(), s.D, true);
      const float inverse = merged.sum == 0.0f ? 0.0f : 1.0f / merged.sum;  // a row that saw no key has the result 0
      for (int64_t d = 0; d < s.D; ++d) row[d] = row[d] * factor + merged.mean;
      add_blocks(at, s.NB, blocks);
      for (int64_t d = 0; d < s.D; ++d) row[d] *= inverse;
      out.write(i / s.L / s.HQ, head, i % s.L, 0, s.D, row);
    }
  });
}

TORCH_LIBRARY_FRAGMENT(gdn, m) { define<AuraFlashP2, &flash_p2>(m); }

}  // namespace torch_gdn::cpu
