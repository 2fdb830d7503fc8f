// refused: atomic_fetch_add_explicit does not take an atomic_ulong
#include <metal_stdlib>
using namespace metal;

kernel void count(device atomic_ulong* total [[buffer(0)]]) {
  atomic_fetch_add_explicit(total, 1ul, memory_order_relaxed);
}
