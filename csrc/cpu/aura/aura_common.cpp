#include "cpu/aura/aura_common.h"

#include <bit>
#include <cstring>

namespace torch_gdn::cpu {

namespace {

// Quadratic residues of the prime q, as bits: row i of Paley's matrix has +1 where (j - i) mod q is one.
constexpr uint32_t quadratic_residues(int q) {
  uint32_t found = 0;
  for (int i = 1; i < q; ++i) found |= 1u << (i * i % q);
  return found;
}

// Paley's Hadamard matrix of order m = q + 1, q a prime that leaves 3 over 4: the identity and a skew matrix.
template <int m>
constexpr float paley_sign(int i, int j) {
  constexpr int q = m - 1;
  constexpr uint32_t residues = quadratic_residues(q);
  if (i == 0 || i == j) return 1.0f;
  if (j == 0) return -1.0f;
  return (residues >> ((j - i + q) % q)) & 1 ? 1.0f : -1.0f;
}

// x[a][b] <- sum over a' of H_m[a][a'] x[a'][b], or of H_m[a'][a].
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

TORCH_GDN_VECTORISED void multiply_by_sylvester(float* x, int64_t D, int64_t width) {
  for (int64_t half = 1; half < width; half *= 2) {
    for (int64_t first = 0; first < D; first += 2 * half) {
#pragma omp simd
      for (int64_t i = first; i < first + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
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
  multiply_by_sylvester(x, D, width);
  if (D == 80) multiply_by_paley<20>(x, width, inverse);
  if (D == 96) multiply_by_paley<12>(x, width, inverse);
  if (inverse) multiply_by_signs(x, signs, D);
}

void pack_codes(const int32_t* codes, int64_t D, int64_t bits, int32_t* words) {
  uint64_t stream = 0;
  int64_t held = 0;
  for (int64_t d = 0; d < D; ++d) {
    stream |= uint64_t(codes[d]) << held;
    held += bits;
    if (held < 32) continue;
    *words++ = int32_t(uint32_t(stream));
    stream >>= 32;
    held -= 32;
  }
  if (held > 0) *words = int32_t(uint32_t(stream));
}

Codebook::Codebook(const Tensor& centroids, int64_t bits, int64_t D) : bits_(bits), D_(D) {
  const Tensor in_a_row = centroids.contiguous();
  const float* centroid = in_a_row.const_data_ptr<float>();
  if (aura_kernels().dequantise != nullptr) {
    fill(centroid);
    return;
  }
  const int64_t group_bits = bits == 3 ? 6 : 8, codes = group_bits / bits;
  groups_.resize((size_t(1) << group_bits) * codes);
  for (int64_t group = 0; group < int64_t(1) << group_bits; ++group) {
    for (int64_t i = 0; i < codes; ++i) {
      groups_[group * codes + i] = centroid[group >> (i * bits) & ((1 << bits) - 1)];
    }
  }
}

template <int kCodes>
void Codebook::look_up_groups(const int32_t* words, float* out) const {
  static_assert(std::endian::native == std::endian::little, "the bit stream is read byte by byte");
  const auto* bytes = reinterpret_cast<const uint8_t*>(words);
  for (int64_t i = 0; i < D_ / kCodes; ++i) {
    std::memcpy(out + i * kCodes, groups_.data() + int64_t(bytes[i]) * kCodes, kCodes * sizeof(float));
  }
}

void Codebook::fill(const float* centroid) {
  for (int64_t i = 0; bits_ <= 4 && i < 16; ++i) table_.centroids[i] = centroid[i & ((1 << bits_) - 1)];
  for (int64_t i = 0; bits_ == 8 && i < 256; ++i) {
    const auto bits = std::bit_cast<uint32_t>(centroid[i]);
    table_.low[i] = static_cast<uint16_t>(bits);
    table_.high[i] = static_cast<uint16_t>(bits >> 16);
  }
}

void Codebook::dequantise(const int32_t* words, int64_t stride, int64_t rows, float* out, int64_t width) const {
  const auto dequantise = aura_kernels().dequantise;
  if (dequantise != nullptr) return dequantise({words, stride, rows, bits_, D_, &table_, out, width});
  for (int64_t row = 0; row < rows; ++row) look_up_row(words + row * stride, out + row * width);
}

void Codebook::look_up_row(const int32_t* words, float* out) const {
  if (bits_ == 2) return look_up_groups<4>(words, out);
  if (bits_ == 4) return look_up_groups<2>(words, out);
  if (bits_ == 8) return look_up_groups<1>(words, out);
  // 3 bits: three bytes hold eight codes.
  const auto* bytes = reinterpret_cast<const uint8_t*>(words);
  for (int64_t d = 0; d < D_; d += 8, bytes += 3) {
    const uint32_t eight = bytes[0] | bytes[1] << 8 | bytes[2] << 16;
    for (int64_t i = 0; i < 4; ++i) {
      std::memcpy(out + d + 2 * i, groups_.data() + (eight >> (6 * i) & 63) * 2, 2 * sizeof(float));
    }
  }
}

namespace {
Tensor with_dimensions(Tensor x, int64_t count) {
  while (x.dim() < count) x = x.unsqueeze(0);
  return x.dim() == count ? x : x.flatten(0, x.dim() - count);
}
}  // namespace

Tensor as_four(const Tensor& x) { return with_dimensions(x, 4); }
Tensor as_three(const Tensor& x) { return with_dimensions(x, 3); }

}  // namespace torch_gdn::cpu
