// <metal_simdgroup_matrix>. A simdgroup holds an 8x8 matrix as two elements per lane. Lane l holds row (l / 16) * 4 +
// (l / 2) % 4, columns c and c + 1, with c = (l / 8 % 2) * 4 + (l % 2) * 2. MLX's BaseMMAFrag::get_coord and llama.cpp
// rely on this layout. Products are accumulated in float, whatever the element types are, and rounded once to the
// result's type.
#pragma once

namespace metal {

template <typename T, int Cols, int Rows = Cols>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "simdgroup_matrix: only 8x8 exists");
  static_assert(is_same<T, float>::value || is_same<T, half>::value || is_same<T, bfloat>::value,
                "simdgroup_matrix: elements are float, half or bfloat");
  typedef vec<T, 2> storage_type;
  typedef T value_type;

  simdgroup_matrix() = default;
  METAL_FUNC explicit simdgroup_matrix(T diagonal);

  METAL_FUNC thread storage_type& thread_elements() { return (thread storage_type&)simulator_elements; }
  METAL_FUNC const thread storage_type& thread_elements() const {
    return (const thread storage_type&)simulator_elements;
  }

  storage_type simulator_elements;
};

using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

}  // namespace metal

namespace simulator {

METAL_FUNC uint row_of(uint lane) { return lane / 16 * 4 + lane / 2 % 4; }
METAL_FUNC uint column_of(uint lane) { return lane / 8 % 2 * 4 + lane % 2 * 2; }

typedef float row __attribute__((ext_vector_type(8)));
typedef float pair __attribute__((ext_vector_type(2)));

// The slot of d = a b + c holds a lane's elements of a, b and c, and then those of d.
struct multiply_slot {
  pair a, b, d;
};
SIMULATOR_UNWATCHED inline void multiply_matrices(void* const slots[32]) {
  alignas(row) float a[8][8], b[8][8], d[8][8];
  for (uint lane = 0; lane < 32; ++lane) {
    if (!slots[lane]) return;  // the runtime reports the incomplete simdgroup
    const multiply_slot* slot = static_cast<const multiply_slot*>(slots[lane]);
    const uint i = row_of(lane), j = column_of(lane);
    *reinterpret_cast<pair*>(&a[i][j]) = slot->a;
    *reinterpret_cast<pair*>(&b[i][j]) = slot->b;
    *reinterpret_cast<pair*>(&d[i][j]) = slot->d;
  }
  uint depths[8], count = 0;
  const uint8_t* order = simulator_reduction_order();
  for (uint n = 0; n < 32; ++n) {
    if (order[n] < 8) depths[count++] = order[n];
  }
  for (uint i = 0; i < 8; ++i) {
    row sum = *reinterpret_cast<const row*>(d[i]);
    for (uint k : depths) sum = __builtin_elementwise_fma(row(a[i][k]), *reinterpret_cast<const row*>(b[k]), sum);
    *reinterpret_cast<row*>(d[i]) = sum;
  }
  for (uint lane = 0; lane < 32; ++lane) {
    static_cast<multiply_slot*>(slots[lane])->d = *reinterpret_cast<const pair*>(&d[row_of(lane)][column_of(lane)]);
  }
  simulator_count_multiply();
}

template <typename D, typename A, typename B, typename C>
SIMULATOR_UNWATCHED inline metal::vec<D, 2> multiply_add(const char* operation, metal::vec<A, 2> a, metal::vec<B, 2> b,
                                                         metal::vec<C, 2> c) {
  multiply_slot slot = {pair{a.x, a.y}, pair{b.x, b.y}, pair{c.x, c.y}};
  simulator_collective(operation, SIMULATOR_SITE, &slot, multiply_matrices);
  return metal::vec<D, 2>(slot.d[0], slot.d[1]);
}

}  // namespace simulator

namespace metal {

template <typename T, int Cols, int Rows>
METAL_FUNC simdgroup_matrix<T, Cols, Rows>::simdgroup_matrix(T diagonal) {
  uint lane = simulator::meet_all_lanes(SIMULATOR_NAME("simdgroup_matrix"));
  uint row = simulator::row_of(lane), column = simulator::column_of(lane);
  simulator_elements = storage_type(row == column ? diagonal : T(0), row == column + 1 ? diagonal : T(0));
}

template <typename T, int Cols, int Rows = Cols>
METAL_FUNC simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Cols, Rows> matrix;
  matrix.thread_elements() = vec<T, 2>(value);
  return matrix;
}

// Element (row, column) is source[(origin.y + row) * elements_per_row + origin.x + column]. A transposed load or store
// exchanges row and column. Each lane reads or writes its own two elements.
#define SIMULATOR_LOAD(space)                                                                                       \
  template <typename T, int Cols, int Rows>                                                                         \
  METAL_FUNC void simdgroup_load(thread simdgroup_matrix<T, Cols, Rows>& matrix, space T* source,                   \
                                 ulong elements_per_row = Cols, ulong2 matrix_origin = 0, bool transpose = false) { \
    uint lane = simulator::meet_all_lanes(SIMULATOR_NAME("simdgroup_load"));                                        \
    ulong row = simulator::row_of(lane), column = simulator::column_of(lane);                                       \
    source += matrix_origin.y * elements_per_row + matrix_origin.x;                                                 \
    T first = transpose ? source[column * elements_per_row + row] : source[row * elements_per_row + column];        \
    T second =                                                                                                      \
        transpose ? source[(column + 1) * elements_per_row + row] : source[row * elements_per_row + column + 1];    \
    matrix.thread_elements() = vec<T, 2>(first, second);                                                            \
  }
#define SIMULATOR_STORE(space)                                                                                       \
  template <typename T, int Cols, int Rows>                                                                          \
  METAL_FUNC void simdgroup_store(simdgroup_matrix<T, Cols, Rows> matrix, space T* destination,                      \
                                  ulong elements_per_row = Cols, ulong2 matrix_origin = 0, bool transpose = false) { \
    uint lane = simulator::meet_all_lanes(SIMULATOR_NAME("simdgroup_store"));                                        \
    ulong row = simulator::row_of(lane), column = simulator::column_of(lane);                                        \
    destination += matrix_origin.y * elements_per_row + matrix_origin.x;                                             \
    destination[transpose ? column * elements_per_row + row : row * elements_per_row + column] =                     \
        matrix.thread_elements().x;                                                                                  \
    destination[transpose ? (column + 1) * elements_per_row + row : row * elements_per_row + column + 1] =           \
        matrix.thread_elements().y;                                                                                  \
  }
SIMULATOR_LOAD(const device)
SIMULATOR_LOAD(const threadgroup)
SIMULATOR_LOAD(constant)
SIMULATOR_STORE(device)
SIMULATOR_STORE(threadgroup)
#undef SIMULATOR_LOAD
#undef SIMULATOR_STORE

template <typename D, typename A, typename B, typename C>
METAL_FUNC void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  d.thread_elements() = simulator::multiply_add<D>(SIMULATOR_NAME("simdgroup_multiply_accumulate"), a.thread_elements(),
                                                   b.thread_elements(), c.thread_elements());
}
template <typename D, typename A, typename B>
METAL_FUNC void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b) {
  d.thread_elements() = simulator::multiply_add<D>(SIMULATOR_NAME("simdgroup_multiply"), a.thread_elements(),
                                                   b.thread_elements(), float2(0.0f));
}
template <typename T>
METAL_FUNC simdgroup_matrix<T, 8, 8> operator*(simdgroup_matrix<T, 8, 8> a, simdgroup_matrix<T, 8, 8> b) {
  simdgroup_matrix<T, 8, 8> product;
  simdgroup_multiply(product, a, b);
  return product;
}

}  // namespace metal
