#include "cpu/aura/codes.h"

#include <bit>
#include <cstring>

namespace torch_gdn::cpu {

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
  const Tensor contiguous = centroids.contiguous();
  const float* centroid = contiguous.const_data_ptr<float>();
  if (aura_kernels().dequantise != nullptr) {
    fill_table(centroid);
  } else {
    fill_groups(centroid);
  }
}

void Codebook::fill_table(const float* centroids) {
  for (int64_t i = 0; bits_ <= 4 && i < 16; ++i) table_.centroids[i] = centroids[i & ((1 << bits_) - 1)];
  for (int64_t i = 0; bits_ == 8 && i < 256; ++i) {
    const auto bits = std::bit_cast<uint32_t>(centroids[i]);
    table_.low[i] = static_cast<uint16_t>(bits);
    table_.high[i] = static_cast<uint16_t>(bits >> 16);
  }
}

void Codebook::fill_groups(const float* centroids) {
  const int64_t group_bits = bits_ == 3 ? 6 : 8, codes = group_bits / bits_;
  groups_.resize((size_t(1) << group_bits) * codes);
  for (int64_t group = 0; group < int64_t(1) << group_bits; ++group) {
    for (int64_t i = 0; i < codes; ++i) {
      groups_[group * codes + i] = centroids[group >> (i * bits_) & ((1 << bits_) - 1)];
    }
  }
}

void Codebook::dequantise(const int32_t* words, int64_t stride, int64_t rows, float* out, int64_t width) const {
  const auto dequantise = aura_kernels().dequantise;
  if (dequantise != nullptr) return dequantise({words, stride, rows, bits_, D_, &table_, out, width});
  for (int64_t row = 0; row < rows; ++row) dequantise_row(words + row * stride, out + row * width);
}

template <int kCodes>
void Codebook::dequantise_groups(const int32_t* words, float* out) const {
  static_assert(std::endian::native == std::endian::little, "the bit stream is read byte by byte");
  const auto* bytes = reinterpret_cast<const uint8_t*>(words);
  for (int64_t i = 0; i < D_ / kCodes; ++i) {
    std::memcpy(out + i * kCodes, groups_.data() + int64_t(bytes[i]) * kCodes, kCodes * sizeof(float));
  }
}

void Codebook::dequantise_row(const int32_t* words, float* out) const {
  if (bits_ == 2) return dequantise_groups<4>(words, out);
  if (bits_ == 4) return dequantise_groups<2>(words, out);
  if (bits_ == 8) return dequantise_groups<1>(words, out);
  // With 3 bits, three bytes hold eight codes.
  const auto* bytes = reinterpret_cast<const uint8_t*>(words);
  for (int64_t d = 0; d < D_; d += 8, bytes += 3) {
    const uint32_t eight = bytes[0] | bytes[1] << 8 | bytes[2] << 16;
    for (int64_t i = 0; i < 4; ++i) {
      std::memcpy(out + d + 2 * i, groups_.data() + (eight >> (6 * i) & 63) * 2, 2 * sizeof(float));
    }
  }
}

}  // namespace torch_gdn::cpu
