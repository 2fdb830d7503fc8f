// Computes y = x * rstd with rstd = rsqrt(sum of x^2 + eps), like FLA's l2norm_fwd.
// A simdgroup owns one row, and holds a block of it in registers, in f32. Lane i holds every 32nd element from i on. A
// row of D elements is one block. D is 0 for rows of more than 1,024 elements. These take several blocks and are read
// twice, once for the sum and once for y. Each block's sum is formed separately, so that the rounding error grows less
// with the row.
// Layout: x [B, T, H, D] with row strides; y and rstd contiguous.
#include "core/fragment.h"
#include "core/rows.h"
#include "layers/parameters.h"

// Loads the lane's elements of a block, with zeros past the block's end. Returns the sum of their squares.
template <typename T, int Own>
METAL_FUNC float load_block(thread float* values, device const T* source, int columns, uint lane) {
  float sum = 0.0f;
  UNROLL for (int own = 0; own < Own; ++own) {
    const int column = own * 32 + int(lane);
    values[own] = column < columns ? float(source[column]) : 0.0f;
    sum += values[own] * values[own];
  }
  return sum;
}

template <typename T, int Own>
METAL_FUNC void store_block(device T* target, thread const float* values, float scale, int columns, uint lane) {
  UNROLL for (int own = 0; own < Own; ++own) {
    const int column = own * 32 + int(lane);
    if (column < columns) target[column] = T(values[own] * scale);
  }
}

METAL_FUNC int block_size(int64_t remaining) { return int(min(remaining, int64_t(kL2NormBlock))); }

template <typename T, int D>
[[kernel]] void l2norm(
    device const T* x [[buffer(0)]],
    device T* y [[buffer(1)]],
    device float* rstd [[buffer(2)]],
    constant L2NormParameters& parameters [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(D >= 0 && D <= kL2NormBlock, "a row of D elements is one block");
  constexpr int kBlock = D > 0 ? D : kL2NormBlock, kOwn = (kBlock + 31) / 32;
  const int64_t columns = D > 0 ? D : parameters.D;
  const RowIndex at =
      row_index(int64_t(group.x) * kL2NormRows + simdgroup, parameters.rows, parameters.tokens, parameters.heads);
  device const T* source = x + offset_of(parameters.x, at);
  device T* target = y + at.row * columns;

  float values[kOwn];
  float sum = load_block<T, kOwn>(values, source, kBlock, lane);
  if constexpr (D == 0) {
    for (int64_t first = kBlock; first < columns; first += kBlock) {
      sum += load_block<T, kOwn>(values, source + first, block_size(columns - first), lane);
    }
  }
  const float scale = rsqrt(simd_sum(sum) + parameters.eps);
  if (!at.is_present) return;
  if (parameters.has_rstd != 0 && lane == 0) rstd[at.row] = scale;
  if constexpr (D > 0) {
    store_block<T, kOwn>(target, values, scale, D, lane);
  } else {
    for (int64_t first = 0; first < columns; first += kBlock) {
      load_block<T, kOwn>(values, source + first, block_size(columns - first), lane);
      store_block<T, kOwn>(target + first, values, scale, block_size(columns - first), lane);
    }
  }
}
