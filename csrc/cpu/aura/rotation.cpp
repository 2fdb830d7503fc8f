#include "cpu/aura/rotation.h"

#include "cpu/simd/aura_kernels.h"

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

void multiply_by_signs(float* x, const float* signs, int64_t D) {
  for (int64_t d = 0; d < D; ++d) x[d] *= signs[d];
}

}  // namespace

void rotate(float* x, const float* signs, int64_t D, bool inverse) {
  if (!inverse) multiply_by_signs(x, signs, D);
  const int64_t width = D == 80 ? 4 : D == 96 ? 8 : D;
  aura_kernels().multiply_by_sylvester(x, D, width);
  if (D == 80) multiply_by_paley<20>(x, width, inverse);
  if (D == 96) multiply_by_paley<12>(x, width, inverse);
  if (inverse) multiply_by_signs(x, signs, D);
}

}  // namespace torch_gdn::cpu
