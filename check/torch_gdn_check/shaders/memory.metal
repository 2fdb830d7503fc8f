// Probes how memory is bound, and probes the error log.
#include "core/error.h"
#include "core/parameters.h"

// y = x + 1, 32 elements per threadgroup.
template <typename T>
[[kernel]] void probe_increment(
    device const T* x [[buffer(0)]],
    device T* y [[buffer(1)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int64_t i = int64_t(group.x) * 32 + lane;
  y[i] = T(float(x[i]) + 1.0f);
}

// Row `lane` of y [32, 30] holds the lane's element of each of the 30 other buffers.
template <typename T>
[[kernel]] void probe_many_buffers(
    device const T* x0 [[buffer(0)]],
    device const T* x1 [[buffer(1)]],
    device const T* x2 [[buffer(2)]],
    device const T* x3 [[buffer(3)]],
    device const T* x4 [[buffer(4)]],
    device const T* x5 [[buffer(5)]],
    device const T* x6 [[buffer(6)]],
    device const T* x7 [[buffer(7)]],
    device const T* x8 [[buffer(8)]],
    device const T* x9 [[buffer(9)]],
    device const T* x10 [[buffer(10)]],
    device const T* x11 [[buffer(11)]],
    device const T* x12 [[buffer(12)]],
    device const T* x13 [[buffer(13)]],
    device const T* x14 [[buffer(14)]],
    device const T* x15 [[buffer(15)]],
    device const T* x16 [[buffer(16)]],
    device const T* x17 [[buffer(17)]],
    device const T* x18 [[buffer(18)]],
    device const T* x19 [[buffer(19)]],
    device const T* x20 [[buffer(20)]],
    device const T* x21 [[buffer(21)]],
    device const T* x22 [[buffer(22)]],
    device const T* x23 [[buffer(23)]],
    device const T* x24 [[buffer(24)]],
    device const T* x25 [[buffer(25)]],
    device const T* x26 [[buffer(26)]],
    device const T* x27 [[buffer(27)]],
    device const T* x28 [[buffer(28)]],
    device const T* x29 [[buffer(29)]],
    device T* y [[buffer(30)]],
    uint lane [[thread_index_in_simdgroup]]) {
  device T* row = y + 30 * lane;
#define COPY(n) row[n] = x##n[lane]
  COPY(0), COPY(1), COPY(2), COPY(3), COPY(4), COPY(5), COPY(6), COPY(7), COPY(8), COPY(9);
  COPY(10), COPY(11), COPY(12), COPY(13), COPY(14), COPY(15), COPY(16), COPY(17), COPY(18), COPY(19);
  COPY(20), COPY(21), COPY(22), COPY(23), COPY(24), COPY(25), COPY(26), COPY(27), COPY(28), COPY(29);
#undef COPY
}

template <int Words>
struct ProbeBlock {
  int words[Words];
};

template <int Words>
[[kernel]] void probe_block(
    constant const ProbeBlock<Words>& block [[buffer(0)]],
    device int* copy [[buffer(1)]],
    uint lane [[thread_index_in_simdgroup]]) {
  for (int i = int(lane); i < Words; i += 32) copy[i] = block.words[i];
}

// Reads bytes at `index` and 2^32 bytes before it. A single 32-bit index cannot tell the two apart.
template <int Value>
[[kernel]] void probe_large_buffer(
    device uchar* bytes [[buffer(0)]],
    constant const int64_t& index [[buffer(1)]],
    uint lane [[thread_index_in_simdgroup]]) {
  if (lane == 0) {
    bytes[index] = uchar(Value);
    bytes[index - 4294967296] = uchar(Value + 1);
  }
}

// Each thread fills its words of threadgroup memory, and reads those of the opposite thread.
template <int Words>
[[kernel]] void probe_threadgroup_memory(
    device int* copy [[buffer(0)]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup int words[Words];
  for (int i = int(thread_index); i < Words; i += 256) words[i] = 3 * i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = int(thread_index); i < Words; i += 256) copy[i] = words[Words - 1 - i];
}

template <int Got>
[[kernel]] void probe_error(
    device ErrorLog* errors [[buffer(0)]],
    constant const OpName& op [[buffer(1)]],
    uint lane [[thread_index_in_simdgroup]]) {
  if (lane == 0) report_error(errors, op, "x: expected nothing, got ", Got, 7, __LINE__);
}
