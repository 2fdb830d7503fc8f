// refused: undeclared identifier 'memory_order_acq_rel'
#include <metal_stdlib>
using namespace metal;

kernel void count(device atomic_uint* total [[buffer(0)]]) {
  atomic_fetch_add_explicit(total, 1u, memory_order_acq_rel);  // of Metal 3.2
}
