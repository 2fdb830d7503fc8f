// The conversions of 16-bit floats that clang leaves to a run-time library. Without AVX512-BF16 or AVX-NE-CONVERT it
// calls two of them for bfloat, and without F16C the others for half. The libgcc of GCC 12 has none for bfloat, and
// that of GCC 11 has none at all. They compute with integers, so that flushed denormals change nothing.
#include <bit>
#include <cstdint>

namespace {

template <typename Bits_, int kMantissa_, int kExponent_>
struct Format {
  using Bits = Bits_;
  static constexpr int kMantissa = kMantissa_, kExponent = kExponent_;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr Bits kSign = Bits{1} << (kMantissa + kExponent);
  static constexpr Bits kInfinity = ((Bits{1} << kExponent) - 1) << kMantissa;
  static constexpr Bits kImplicit = Bits{1} << kMantissa;
};
using Half = Format<uint16_t, 10, 5>;
using Bfloat = Format<uint16_t, 7, 8>;
using Float = Format<uint32_t, 23, 8>;
using Double = Format<uint64_t, 52, 11>;

// Rounds to nearest, ties to even. A NaN keeps its sign and its first bits, and becomes quiet.
template <typename To, typename From>
uint16_t narrowed(typename From::Bits bits) {
  using Wide = typename From::Bits;
  const uint16_t sign = bits & From::kSign ? To::kSign : 0;
  const Wide magnitude = bits & ~From::kSign;
  int shift = From::kMantissa - To::kMantissa;
  if (magnitude > From::kInfinity) {
    const Wide first = (magnitude >> shift) & (To::kImplicit - 1);
    return static_cast<uint16_t>(sign | To::kInfinity | To::kImplicit >> 1 | first);
  }
  const int field = static_cast<int>(magnitude >> From::kMantissa);
  const Wide mantissa = (magnitude & (From::kImplicit - 1)) | (field ? From::kImplicit : 0);
  int exponent = (field ? field : 1) - From::kBias + To::kBias;
  if (exponent >= (1 << To::kExponent) - 1) return sign | To::kInfinity;
  if (exponent < 1) {  // the result is denormal
    shift += 1 - exponent;
    exponent = 1;
  }
  if (shift > From::kMantissa + 2) return sign;  // less than a quarter of the smallest denormal
  const Wide kept = mantissa >> shift, rest = mantissa & ((Wide{1} << shift) - 1), half = Wide{1} << (shift - 1);
  const Wide rounded = kept + (rest > half || (rest == half && (kept & 1)));
  // The implicit bit of `rounded` adds the one that is missing from the exponent. So does a carry, up to infinity.
  return static_cast<uint16_t>(sign | (rounded + (static_cast<Wide>(exponent - 1) << To::kMantissa)));
}

float widened(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & Half::kSign) << 16, magnitude = bits & ~Half::kSign;
  constexpr int kShift = Float::kMantissa - Half::kMantissa;
  if (magnitude >= Half::kInfinity) {
    const uint32_t quiet = magnitude > Half::kInfinity ? Float::kImplicit >> 1 : 0;
    return std::bit_cast<float>(sign | Float::kInfinity | quiet | (magnitude & (Half::kImplicit - 1u)) << kShift);
  }
  if (magnitude == 0) return std::bit_cast<float>(sign);
  uint32_t mantissa = magnitude & (Half::kImplicit - 1u);
  uint32_t exponent = magnitude >> Half::kMantissa;
  if (exponent == 0) {
    const int zeros =
        std::countl_zero(mantissa) - (31 - Half::kMantissa);  // before the first one, which becomes implicit
    mantissa = (mantissa << zeros) & (Half::kImplicit - 1u);
    exponent = static_cast<uint32_t>(1 - zeros + Float::kBias - Half::kBias);
  } else {
    exponent += Float::kBias - Half::kBias;
  }
  return std::bit_cast<float>(sign | exponent << Float::kMantissa | mantissa << kShift);
}

}  // namespace

// The names and types are those of clang's calls.
extern "C" {
float __extendhfsf2(_Float16 x) { return widened(std::bit_cast<uint16_t>(x)); }
_Float16 __truncsfhf2(float x) { return std::bit_cast<_Float16>(narrowed<Half, Float>(std::bit_cast<uint32_t>(x))); }
_Float16 __truncdfhf2(double x) { return std::bit_cast<_Float16>(narrowed<Half, Double>(std::bit_cast<uint64_t>(x))); }
__bf16 __truncsfbf2(float x) { return std::bit_cast<__bf16>(narrowed<Bfloat, Float>(std::bit_cast<uint32_t>(x))); }
__bf16 __truncdfbf2(double x) { return std::bit_cast<__bf16>(narrowed<Bfloat, Double>(std::bit_cast<uint64_t>(x))); }
}
