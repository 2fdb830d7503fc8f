#include <cmath>

#include "cpu/aura/vectors.h"
#include "cpu/define.h"
#include "cpu/simd/aura_kernels.h"
#include "ops/aura/codes.h"

namespace torch_gdn::cpu {

namespace {

// Returns the quadratic residues of the prime q as bits. Row i of Paley's matrix has +1 where (j - i) mod q is a
// residue.
constexpr uint32_t quadratic_residues(int q) {
  uint32_t result = 0;
  for (int i = 1; i < q; ++i) result |= 1u << (i * i % q);
  return result;
}

// Paley's Hadamard matrix of order m = q + 1, for a prime q that is 3 modulo 4, is the identity plus a skew matrix.
template <int m>
constexpr float paley_sign(int i, int j) {
  constexpr int q = m - 1;
  constexpr uint32_t residues = quadratic_residues(q);
  if (i == 0 || i == j) return 1.0f;
  if (j == 0) return -1.0f;
  return (residues >> ((j - i + q) % q)) & 1 ? 1.0f : -1.0f;
}

// Computes x[a][b] <- sum over a' of H_m[a][a'] x[a'][b], or of H_m[a'][a] x[a'][b].
template <int m>
void multiply_by_paley(float* x, int64_t width, bool transposed) {
  float in[m];
  for (int64_t b = 0; b < width; ++b) {
    for (int a = 0; a < m; ++a) in[a] = x[a * width + b];
    for (int a = 0; a < m; ++a) {
      float sum = 0;
      for (int j = 0; j < m; ++j) sum += (transposed ? paley_sign<m>(j, a) : paley_sign<m>(a, j)) * in[j];
      x[a * width + b] = sum;
    }
  }
}

}  // namespace

void rotate(float* x, const Tensor& signs, bool inverse, float factor) {
  const int64_t D = signs.numel(), width = D == 80 ? 4 : D == 96 ? 8 : D;
  const float* sign = signs.const_data_ptr<float>();
  const auto multiply_by_signs = [&] {
    for (int64_t d = 0; d < D; ++d) x[d] *= sign[d];
  };
  if (!inverse) multiply_by_signs();
  aura_kernels().multiply_by_sylvester(x, D, width);
  if (D == 80) multiply_by_paley<20>(x, width, inverse);
  if (D == 96) multiply_by_paley<12>(x, width, inverse);
  if (inverse) multiply_by_signs();
  for (int64_t d = 0; d < D; ++d) x[d] *= factor;
}

namespace {

void run(const AuraRotate<int64_t>& op, const Tensor& y_any) {
  const Tensor x = as_vectors(op.x, "x"), signs = op.signs.contiguous();
  const Rows in(x), out(as_vectors(y_any, "y"));
  const auto factor = static_cast<float>(op.scale / std::sqrt(static_cast<double>(x.size(3))));
  for_each_vector(x, [&](int64_t b, int64_t h, int64_t t) {
    float row[kLargestD];
    in.read(b, h, t, row);
    rotate(row, signs, op.inverse, factor);
    out.write(b, h, t, row);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { define<AuraRotate, &run>(m); }

}  // namespace torch_gdn::cpu
