// Decodes rows of packed weights to numbers: all rows, or those that the indices name. A thread owns kDequantizeColumns
// columns of one row of the result. An index out of range is reported, and its row is zeros.
// Layout: packed weights [N, K] with strides, indices [n]; rows [n, K].
#include "core/error.h"
#include "core/indices.h"
#include "experts/weights.h"
#include "quantized/parameters.h"

template <typename T, int Bits>
[[kernel]] void dequantize(
    device const uchar* weight [[buffer(0)]],
    device const uchar* scales [[buffer(1)]],
    device const uchar* biases [[buffer(2)]],
    device const int* indices [[buffer(3)]],
    device T* rows [[buffer(4)]],
    device ErrorLog* errors [[buffer(5)]],
    constant DequantizeParameters& parameters [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const int column = int(group.x) * (kDequantizeThreads * kDequantizeColumns) + int(thread_index) * kDequantizeColumns;
  if (column >= parameters.K) return;
  const int target_row = int(group.y);
  int64_t row = target_row;
  if (parameters.index_bytes != 0) row = read_index(indices, target_row, parameters.index_bytes);
  device T* target = rows + int64_t(target_row) * parameters.K + column;
  if (row < 0 || row >= parameters.N) {
    if (column == 0) {
      report_error(errors, parameters.op, "indices: expected rows from 0 to N - 1, got ", row, target_row, __LINE__);
    }
    UNROLL for (int i = 0; i < kDequantizeColumns; ++i) {
      if (column + i < parameters.K) target[i] = T(0);
    }
    return;
  }
  const Weights<T, Bits, 1> own = rows_of<T, Bits, 1>({weight, scales, biases, &parameters.weight}, 0, row, 1);
  Codes<Bits, kDequantizeColumns> codes;
  own.template load_codes<1>(codes, 0, column);
  const ScaleAndRest<Bits> scale = own.scale_at(0, column);
  UNROLL for (int step = 0; step < kDequantizeColumns / 4; ++step) {
    const Values<4> values = codes.weights(step, scale);
    if constexpr (Bits == kE4M3) {  // rows end at any column
      UNROLL for (int i = 0; i < 4; ++i) {
        if (column + step * 4 + i < parameters.K) target[step * 4 + i] = T(values.at[i]);
      }
    } else {
      store_values<T, 4>(target + step * 4, values);
    }
  }
}
