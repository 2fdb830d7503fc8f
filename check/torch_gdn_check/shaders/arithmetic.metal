// Probes f32 arithmetic and the values stored in each dtype.
#include <metal_stdlib>

#include "core/exponential.h"
#include "core/parameters.h"
using namespace metal;

// results [6, count]: exp(x), our own exp of x, and the log, rsqrt, sqrt and reciprocal of fabs(x).
template <typename T>
[[kernel]] void probe_functions(
    device const T* x [[buffer(0)]],
    device T* results [[buffer(1)]],
    constant const int& count [[buffer(2)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const int64_t i = int64_t(group.x) * 256 + thread_index;
  const T value = x[i], size = fabs(value);
  device T* result = results + i;
  result[0 * int64_t(count)] = exp(value);
  result[1 * int64_t(count)] = gate_exp(value);
  result[2 * int64_t(count)] = log(size);
  result[3 * int64_t(count)] = rsqrt(size);
  result[4 * int64_t(count)] = sqrt(size);
  result[5 * int64_t(count)] = 1.0f / size;
}

// results [3, 32]: the fused product and sum, the same as two operations, and the quotient of x and y.
template <typename T>
[[kernel]] void probe_products(
    device const T* x [[buffer(0)]],
    device const T* y [[buffer(1)]],
    device const T* z [[buffer(2)]],
    device T* results [[buffer(3)]],
    uint lane [[thread_index_in_simdgroup]]) {
  results[lane] = fma(x[lane], y[lane], z[lane]);
  results[32 + lane] = x[lane] * y[lane] + z[lane];
  results[64 + lane] = x[lane] / y[lane];
}

// results [5, 32]: expressions that fast math would simplify away.
template <typename T>
[[kernel]] void probe_safe_math(
    device const T* x [[buffer(0)]],
    device const T* y [[buffer(1)]],
    device T* results [[buffer(2)]],
    uint lane [[thread_index_in_simdgroup]]) {
  const T value = x[lane], other = y[lane];
  results[lane] = (value + other) - other;
  results[32 + lane] = value - value;
  results[64 + lane] = isnan(value) ? 1.0f : 0.0f;
  results[96 + lane] = value == value ? 1.0f : 0.0f;
  results[128 + lane] = value * 0.0f;
}

// widened [count]: values of T as f32, times a power of two. narrowed [count]: values of f32 as T.
template <typename T>
[[kernel]] void probe_conversions(
    device const T* stored [[buffer(0)]],
    device const float* wide [[buffer(1)]],
    device float* widened [[buffer(2)]],
    device T* narrowed [[buffer(3)]],
    constant const float& factor [[buffer(4)]],
    uint lane [[thread_index_in_simdgroup]]) {
  widened[lane] = float(stored[lane]) * factor;
  narrowed[lane] = T(wide[lane] * (1.0f / factor));
}
