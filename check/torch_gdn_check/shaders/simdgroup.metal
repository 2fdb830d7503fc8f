// Probes how threads form simdgroups, and what lanes pass to each other.
#include <metal_stdlib>

#include "core/parameters.h"
using namespace metal;

// places [threads, 3]: each thread's lane, its simdgroup, and the number of lanes in that simdgroup.
template <int Threads>
[[kernel]] void probe_simdgroups(
    device int* places [[buffer(0)]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  device int* place = places + 3 * thread_index;
  place[0] = int(lane);
  place[1] = int(simdgroup);
  place[2] = simd_sum(1);
}

// floats [5, 32] and integers [6, 32]: what each lane receives if lanes pass the values 10 + 3 * lane.
template <int Lanes>
[[kernel]] void probe_shuffles(
    device float* floats [[buffer(0)]], device int* integers [[buffer(1)]], uint lane [[thread_index_in_simdgroup]]) {
  const int value = 10 + 3 * int(lane);
  const ushort opposite = ushort(Lanes - 1 - int(lane));
  floats[0 * Lanes + lane] = simd_shuffle(float(value), opposite);
  floats[1 * Lanes + lane] = simd_shuffle_xor(float(value), ushort(5));
  floats[2 * Lanes + lane] = simd_shuffle_up(float(value), ushort(1));
  floats[3 * Lanes + lane] = simd_sum(float(value));
  floats[4 * Lanes + lane] = simd_max(float(value));
  integers[0 * Lanes + lane] = simd_shuffle(value, opposite);
  integers[1 * Lanes + lane] = simd_shuffle_xor(value, ushort(5));
  integers[2 * Lanes + lane] = simd_shuffle_up(value, ushort(1));
  integers[3 * Lanes + lane] = simd_sum(value);
  integers[4 * Lanes + lane] = simd_min(value);
  integers[5 * Lanes + lane] = simd_prefix_exclusive_sum(value);
}
