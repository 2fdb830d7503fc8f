// The norm for one ISA variant. It reads a row twice, once for the sum of squares and once for the values. The second
// time, the row is in the first-level cache.

template <typename Element, bool kResidual>
TORCH_GDN_INLINE Floats row_values(const Element* x, const Element* residual, int64_t first, int64_t count) {
  Floats values = load(x + first, count);
  if constexpr (kResidual) values += load(residual + first, count);
  return values;
}

template <typename Element, bool kResidual>
void normalise_rows(const NormRows& rows) {
  const auto* x = static_cast<const Element*>(rows.x);
  const auto* residual = static_cast<const Element*>(rows.residual);
  auto *out = static_cast<Element*>(rows.out), *sum = static_cast<Element*>(rows.sum);
  const int64_t D = rows.D;
  for (int64_t row = 0; row < rows.rows; ++row) {
    Floats squares = {};
    for_each_vector(D, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
      const Floats values = row_values<Element, kResidual>(x, residual, first, count);
      squares += values * values;
      if constexpr (kResidual) store(sum + first, values, count);
    });
    const Floats factor = all_lanes(1.0f / __builtin_sqrtf(sum_of_lanes(squares) / static_cast<float>(D) + rows.eps));
    for_each_vector(D, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
      Floats values = row_values<Element, kResidual>(x, residual, first, count) * factor;
      if (rows.round_norm) values = Memory<Element>::rounded(values);
      if (rows.weight != nullptr) values *= load(rows.weight + first, count) + rows.weight_offset;
      store(out + first, values, count);
    });
    x += rows.x_stride;
    out += D;
    if constexpr (kResidual) {
      residual += rows.residual_stride;
      sum += D;
    }
  }
}

template <typename Element>
NormaliseRows normalise_rows_of(bool has_residual) {
  return has_residual ? &normalise_rows<Element, true> : &normalise_rows<Element, false>;
}

NormaliseRows normalise_rows_of(at::ScalarType dtype, bool has_residual) {
  if (dtype == at::kFloat) return normalise_rows_of<float>(has_residual);
  if (dtype == at::kHalf) return normalise_rows_of<c10::Half>(has_residual);
  return normalise_rows_of<c10::BFloat16>(has_residual);
}

constexpr NormKernels kNormKernels = {&normalise_rows_of};
