#include "ops/aura/aura_decode.h"

#include <cmath>

#include "cpu/aura/codes.h"
#include "cpu/aura/rotation.h"
#include "cpu/aura/vectors.h"
#include "cpu/define.h"

namespace torch_gdn {

namespace {

// A vector's mean is a multiple of a vector of ones, and in rotated space of Pi times ones.
std::vector<float> rotated_ones(const float* signs, int64_t D) {
  std::vector<float> ones(D, 1.0f);
  cpu::rotate(ones.data(), signs, D, false);
  for (float& x : ones) x /= std::sqrt(static_cast<float>(D));
  return ones;
}

void run(const AuraDecode<int64_t>& op, const Tensor& x_any) {
  const Tensor codes = cpu::as_vectors(op.vectors.codes, "codes"), norms = cpu::as_values(op.vectors.norms);
  const bool has_means = op.vectors.means.has_value();
  const Tensor means = has_means ? cpu::as_values(*op.vectors.means) : Tensor();
  const Tensor x = cpu::as_vectors(x_any, "x"), signs = op.signs.contiguous();
  const cpu::Rows out(x);
  const cpu::Codebook centroids(op.vectors.codebook, op.code, op.D);
  const auto* sign = signs.const_data_ptr<float>();
  const auto ones = op.rotated ? rotated_ones(sign, op.D) : std::vector<float>(op.D, 1.0f);
  const float factor = op.rotated ? 1.0f : 1.0f / std::sqrt(static_cast<float>(op.D));
  cpu::for_each_vector(codes, [&](int64_t b, int64_t h, int64_t t) {
    float row[cpu::kLargestD];
    centroids.dequantise(cpu::words_at(codes, b, h, t), row);
    if (!op.rotated) cpu::rotate(row, sign, op.D, true);
    const float norm = cpu::norm_at(norms, b, h, t) * factor;
    const float mean = has_means ? cpu::value_at(means, b, h, t) : 0.0f;
    for (int64_t d = 0; d < op.D; ++d) row[d] = row[d] * norm + (has_means ? mean * ones[d] : 0.0f);
    out.write(b, h, t, 0, op.D, row);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<AuraDecode, &run>(m); }

}  // namespace torch_gdn
