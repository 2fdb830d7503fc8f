#include "ops/aura/aura_decode.h"

#include <cmath>

#include "cpu/aura/codes.h"
#include "cpu/aura/rotation.h"
#include "cpu/aura/vectors.h"
#include "cpu/define.h"

namespace torch_gdn {

namespace {

void run(const AuraDecode<int64_t>& op, const Tensor& x_any) {
  const Tensor codes = cpu::as_vectors(op.vectors.codes, "codes"), norms = cpu::as_values(op.vectors.norms);
  const Tensor x = cpu::as_vectors(x_any, "x"), signs = op.signs.contiguous();
  const bool has_tile_means = op.vectors.tile_means.has_value();
  const Tensor tile_means = has_tile_means ? op.vectors.tile_means->to(at::kFloat).contiguous() : Tensor();
  const cpu::Rows out(x);
  const cpu::Codebook centroids(op.vectors.codebook, op.code, op.D);
  const auto* sign = signs.const_data_ptr<float>();
  const float by_root = 1.0f / std::sqrt(static_cast<float>(op.D));
  cpu::for_each_vector(codes, [&](int64_t b, int64_t h, int64_t t) {
    float row[cpu::kLargestD];
    centroids.dequantise(cpu::words_at(codes, b, h, t), row);
    if (!op.rotated) cpu::rotate(row, sign, op.D, true);
    const float norm = cpu::norm_at(norms, b, h, t) * (op.rotated ? 1.0f : by_root);
    for (int64_t d = 0; d < op.D; ++d) row[d] *= norm;
    if (has_tile_means) {
      float added[cpu::kLargestD];
      std::copy_n(tile_means.const_data_ptr<float>() + cpu::offset_of(tile_means, b, h, t / kTokensOfTile), op.D,
                  added);
      if (op.rotated) cpu::rotate(added, sign, op.D, false);
      for (int64_t d = 0; d < op.D; ++d) row[d] += added[d] * (op.rotated ? by_root : 1.0f);
    }
    out.write(b, h, t, 0, op.D, row);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<AuraDecode, &run>(m); }

}  // namespace torch_gdn
