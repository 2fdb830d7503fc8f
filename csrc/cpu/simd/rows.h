// Rows of tensors in and out of f32, for one instruction set; `padding` zeros follow what is read.

TORCH_GDN_INLINE void widen_row(const char* in, at::ScalarType dtype, int64_t count, float* out) {
  if (dtype == at::kFloat) {
    const auto* x = reinterpret_cast<const float*>(in);
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) out[j] = x[j];
  } else if (dtype == at::kBFloat16) {
    const auto* x = reinterpret_cast<const c10::BFloat16*>(in);
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) out[j] = widened(x[j]);
  } else {
    const auto* x = reinterpret_cast<const c10::Half*>(in);
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) out[j] = widened(x[j]);
  }
}

TORCH_GDN_INLINE void narrow_row(const float* in, int64_t count, at::ScalarType dtype, char* out) {
  if (dtype == at::kFloat) {
    auto* x = reinterpret_cast<float*>(out);
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) x[j] = in[j];
  } else if (dtype == at::kBFloat16) {
    auto* x = reinterpret_cast<c10::BFloat16*>(out);
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) x[j].x = narrowed_to_bfloat16(in[j]);
  } else {
    auto* x = reinterpret_cast<c10::Half*>(out);
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) x[j].x = narrowed_to_half(in[j]);
  }
}

TORCH_GDN_INLINE void widen_rows(const HeadRows& in, int64_t tokens, int64_t rows, int64_t count, float* out,
                                 int64_t out_width) {
  for (int64_t i = 0; i < tokens; ++i) {
    widen_row(in.data + i * in.stride, in.dtype, count, out + i * out_width);
    for (int64_t j = count; j < out_width; ++j) out[i * out_width + j] = 0;
  }
  for (int64_t i = tokens * out_width; i < rows * out_width; ++i) out[i] = 0;
}

TORCH_GDN_INLINE void narrow_rows(const float* in, int64_t in_width, int64_t tokens, int64_t count,
                                  const HeadRows& out) {
  for (int64_t i = 0; i < tokens; ++i) {
    narrow_row(in + i * in_width, count, out.dtype, out.data + i * out.stride);
  }
}
