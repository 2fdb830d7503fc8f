// The gated norm for one ISA variant. It reads a row twice, once for the sum of squares and once for the values. The
// second time, the row is in the first-level cache.

template <typename Element, typename Gate>
TORCH_GDN_INLINE void gate_lanes(const GatedNormRows& rows, const Element* x, const Gate* gate, Element* out,
                                 int64_t first, int64_t count, Floats factor) {
  Floats value = load(x + first, count) * factor;
  if (rows.round_norm) value = Memory<Element>::rounded(value);
  if (rows.weight != nullptr) value *= load(rows.weight + first, count);
  if (rows.round_product) value = Memory<Element>::rounded(value);
  const Floats logit = load(gate + first, count);
  value *= sigmoid(logit);
  if (!rows.sigmoid) value *= logit;
  store(out + first, value, count);
}

template <typename Element, typename Gate>
void normalise_gated_rows(const GatedNormRows& rows) {
  const auto* x = static_cast<const Element*>(rows.x);
  const auto* gate = static_cast<const Gate*>(rows.gate);
  auto* out = static_cast<Element*>(rows.out);
  const int64_t D = rows.D, whole = D / kLanes * kLanes;
  for (int64_t row = 0; row < rows.rows; ++row, x += rows.x_stride, gate += rows.gate_stride, out += D) {
    Floats squares = {};
    for (int64_t i = 0; i < whole; i += kLanes) squares += load(x + i) * load(x + i);
    if (whole < D) squares += load(x + whole, D - whole) * load(x + whole, D - whole);
    const Floats factor = all_lanes(1.0f / __builtin_sqrtf(sum_of_lanes(squares) / static_cast<float>(D) + rows.eps));
    for (int64_t i = 0; i < whole; i += kLanes) gate_lanes(rows, x, gate, out, i, kLanes, factor);
    if (whole < D) gate_lanes(rows, x, gate, out, whole, D - whole, factor);
  }
}

template <typename Element>
NormaliseGatedRows normalise_gated_rows_of(at::ScalarType gate) {
  if (gate == at::kFloat) return &normalise_gated_rows<Element, float>;
  return gate == at::kHalf ? &normalise_gated_rows<Element, c10::Half> : &normalise_gated_rows<Element, c10::BFloat16>;
}

NormaliseGatedRows normalise_gated_rows_of(at::ScalarType x, at::ScalarType gate) {
  if (x == at::kFloat) return normalise_gated_rows_of<float>(gate);
  return x == at::kHalf ? normalise_gated_rows_of<c10::Half>(gate) : normalise_gated_rows_of<c10::BFloat16>(gate);
}

constexpr GatedNormKernels kGatedNormKernels = {&normalise_gated_rows_of};
