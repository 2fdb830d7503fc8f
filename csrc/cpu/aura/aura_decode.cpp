#include "cpu/aura/codes.h"
#include "cpu/aura/vectors.h"
#include "cpu/define.h"
#include "ops/aura/codes.h"

namespace torch_gdn::cpu {

namespace {

void run(const AuraDecode<int64_t>& op, const Tensor& x) {
  const Tensor codes = as_vectors(op.vectors.codes, "codes"), norms = as_values(op.vectors.norms);
  const Tensor signs = op.signs.contiguous();
  const bool has_tile_means = op.vectors.tile_means.has_value();
  const Tensor tile_means = has_tile_means ? op.vectors.tile_means->to(at::kFloat).contiguous() : Tensor();
  const Rows out(as_vectors(x, "x"));
  const Codebook centroids(op.vectors.codebook, op.code, op.D);
  const float by_root = inverse_root(op.D);
  for_each_vector(codes, [&](int64_t b, int64_t h, int64_t t) {
    float row[kLargestD];
    centroids.dequantise(words_at(codes, b, h, t), row);
    if (!op.rotated) rotate(row, signs, true, 1.0f);
    const float norm = norm_at(norms, b, h, t) * (op.rotated ? 1.0f : by_root);
    for (int64_t d = 0; d < op.D; ++d) row[d] *= norm;
    if (has_tile_means) {
      float added[kLargestD];
      std::copy_n(tile_means.const_data_ptr<float>() + offset_of(tile_means, b, h, t / kTokensOfTile), op.D, added);
      if (op.rotated) rotate(added, signs, false, by_root);
      for (int64_t d = 0; d < op.D; ++d) row[d] += added[d];
    }
    out.write(b, h, t, row);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { define<AuraDecode, &run>(m); }

}  // namespace torch_gdn::cpu
