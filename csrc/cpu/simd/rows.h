// The kernels of RowKernels for one ISA variant.
#include "cpu/simd/norms.h"

void normalise_rows(const HeadRows& x, const HeadRows& y, int64_t rows, int64_t width, float eps, float* scratch,
                    float* rstd) {
  for (int64_t i = 0; i < rows; ++i) {
    upcast_row(x.data + i * x.stride, x.dtype, width, scratch);
    const float factor = normalise_row(scratch, width, eps);
    if (rstd) rstd[i] = factor;
    downcast_row(scratch, width, y.dtype, y.data + i * y.stride);
  }
}

// Row i of X = (I + A)^-1 is e_i - sum over j < i of A_ij X_j, and X_j ends at column j. The sum is in f64. With
// repeated keys and beta = 1.9, the chunked op then has an error of 6e-7. With f32 and no fused multiply-add, the error
// is 2.2e-6.
void invert_unit_lower(const float* A, int64_t stride, int64_t length, int64_t rows, float* inverse,
                       int64_t inverse_stride) {
  for (int64_t i = 0; i < length; ++i) {
    double row[64] = {};
    row[i] = 1.0;
    for (int64_t j = 0; j < i; ++j) {
      const double factor = A[i * stride + j];
      const float* solved = inverse + j * inverse_stride;
#pragma omp simd
      for (int64_t m = 0; m <= j; ++m) row[m] -= factor * solved[m];
    }
    for (int64_t m = 0; m < rows; ++m) inverse[i * inverse_stride + m] = static_cast<float>(row[m]);
  }
  for (int64_t i = length; i < rows; ++i) {
    for (int64_t m = 0; m < rows; ++m) inverse[i * inverse_stride + m] = 0.0f;
  }
}

constexpr RowKernels kRowKernels = {&upcast_row, &downcast_row, &normalise_rows, &invert_unit_lower};
