#include "cpu/aura/codes.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace torch_gdn::cpu {

void pack_codes(const int32_t* codes, int64_t D, const Code& code, int32_t* words) {
  uint64_t stream = 0;
  int64_t held = 0;
  const int32_t* first = words;
  for (int64_t d = 0; d < D; ++d) {
    stream |= uint64_t(codes[d]) << held;
    held += code.bits;
    if (held < 32) continue;
    *words++ = int32_t(uint32_t(stream));
    stream >>= 32;
    held -= 32;
  }
  if (code.is_trellis()) stream |= uint64_t(uint32_t(*first)) << held;
  if (held > 0) *words = int32_t(uint32_t(stream));
}

Codebook::Codebook(const Tensor& centroids, const Code& code, int64_t D) : code_(code), D_(D) {
  const Tensor contiguous = centroids.contiguous();
  const float* centroid = contiguous.const_data_ptr<float>();
  if (aura_kernels().dequantise != nullptr) {
    fill_table(centroid);
  } else {
    fill_groups(centroid);
  }
}

void Codebook::fill_table(const float* centroids) {
  const int64_t entries = int64_t(1) << code_.window;
  for (int64_t i = 0; entries <= 64 && i < std::max<int64_t>(entries, 16); ++i) {
    table_.centroids[i] = centroids[i % entries];
  }
  for (int64_t i = 0; entries == 256 && i < 256; ++i) {
    const auto bits = std::bit_cast<uint32_t>(centroids[i]);
    table_.low[i] = static_cast<uint16_t>(bits);
    table_.high[i] = static_cast<uint16_t>(bits >> 16);
  }
}

void Codebook::fill_groups(const float* centroids) {
  const int64_t codes = code_.bits == 8 ? 1 : 2, group_bits = (codes - 1) * code_.bits + code_.window;
  groups_.resize((size_t(1) << group_bits) * codes);
  for (int64_t group = 0; group < int64_t(1) << group_bits; ++group) {
    for (int64_t i = 0; i < codes; ++i) {
      groups_[group * codes + i] = centroids[group >> (i * code_.bits) & ((1 << code_.window) - 1)];
    }
  }
}

void Codebook::dequantise(const int32_t* words, int64_t stride, int64_t rows, float* out, int64_t width) const {
  const auto dequantise = aura_kernels().dequantise;
  if (dequantise != nullptr) {
    return dequantise({words, stride, rows, code_.bits, code_.window, D_, &table_, out, width});
  }
  for (int64_t row = 0; row < rows; ++row) dequantise_row(words + row * stride, out + row * width);
}

// Eight codes are kBits bytes. The windows of a trellis code reach into the next byte. At the end of the row this is
// the first byte.
template <int kBits>
void Codebook::dequantise_pairs(const int32_t* words, float* out) const {
  static_assert(std::endian::native == std::endian::little, "the bit stream is read byte by byte");
  const auto* bytes = reinterpret_cast<const uint8_t*>(words);
  const uint8_t first = bytes[0];
  const uint64_t mask = (uint64_t(1) << (kBits + code_.window)) - 1;
  for (int64_t d = 0; d < D_; d += 8, bytes += kBits) {
    uint64_t eight = 0;
    std::memcpy(&eight, bytes, kBits);
    eight |= uint64_t(d + 8 < D_ ? bytes[kBits] : first) << (8 * kBits);
    for (int64_t i = 0; i < 8; i += 2) {
      std::memcpy(out + d + i, groups_.data() + (eight >> (i * kBits) & mask) * 2, 2 * sizeof(float));
    }
  }
}

void Codebook::dequantise_row(const int32_t* words, float* out) const {
  if (code_.bits == 2) return dequantise_pairs<2>(words, out);
  if (code_.bits == 3) return dequantise_pairs<3>(words, out);
  if (code_.bits == 4) return dequantise_pairs<4>(words, out);
  if (code_.bits == 5) return dequantise_pairs<5>(words, out);
  const auto* bytes = reinterpret_cast<const uint8_t*>(words);
  for (int64_t d = 0; d < D_; ++d) out[d] = groups_[bytes[d]];
}

}  // namespace torch_gdn::cpu
