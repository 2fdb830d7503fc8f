// Probes simdgroup matrices: which elements a lane holds, and a product of two matrices as kernels compute it.
#include "core/fragment.h"
#include "core/parameters.h"

// elements [32, 2]: the elements that each lane holds of a row-major matrix [8, 8].
template <typename T>
[[kernel]] void probe_matrix_layout(
    device const T* matrix [[buffer(0)]], device T* elements [[buffer(1)]], uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_matrix<T, 8, 8> loaded;
  simdgroup_load(loaded, matrix, 8);
  elements[2 * lane] = loaded.thread_elements()[0];
  elements[2 * lane + 1] = loaded.thread_elements()[1];
}

// product [8, 8] = left [8, 8] right [8, 8]
template <typename T>
[[kernel]] void probe_matrix_product(
    device const T* left [[buffer(0)]],
    device const T* right [[buffer(1)]],
    device T* product [[buffer(2)]],
    uint lane [[thread_index_in_simdgroup]]) {
  const LanePosition at = lane_position(lane);
  float2 sum = float2(0.0f);
  multiply_add(sum, load_even_fragment(left, 8, 8, at), load_even_fragment(right, 8, 8, at));
  store_even_fragment(product, 8, 8, at, sum);
}
