// Loops over rows of f32 that ops of all families share, in the best ISA variant for this machine.
#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace torch_gdn::cpu {

// Rows of one dtype, one per token. Those of one head of q are an example.
struct HeadRows {
  char* data;
  int64_t stride;  // bytes between rows
  at::ScalarType dtype;
};

// Returns the number of a token, of f32 rows of one number.
inline float number_at(const HeadRows& rows, int64_t token) {
  return *reinterpret_cast<const float*>(rows.data + token * rows.stride);
}

struct RowKernels {
  // Converts elements of one of the three activation dtypes. Rounds to nearest, ties to even.
  void (*upcast)(const void* in, at::ScalarType dtype, int64_t count, float* out);
  void (*downcast)(const float* in, int64_t count, at::ScalarType dtype, void* out);
  // Computes y = x rstd with rstd = 1 / sqrt(sum x^2 + eps) for each row of x. `scratch` holds one row. `rstd` holds
  // one number per row, or is nullptr.
  void (*normalise)(const HeadRows& x, const HeadRows& y, int64_t rows, int64_t width, float eps, float* scratch,
                    float* rstd);
  // Computes inverse = (I + A)^-1 for the strictly lower part of A [length, length]. Its rows are `stride` floats
  // apart. Rows and columns of `inverse` from `length` up to `rows` become zero.
  void (*invert_unit_lower)(const float* A, int64_t stride, int64_t length, int64_t rows, float* inverse,
                            int64_t inverse_stride);
};
const RowKernels& row_kernels();

}  // namespace torch_gdn::cpu
