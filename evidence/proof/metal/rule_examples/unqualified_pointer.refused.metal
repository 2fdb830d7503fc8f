// refused: points or refers to no address space|must have explicit address space qualifier
#include <metal_stdlib>
using namespace metal;

struct Slot {
  float value;
};
typedef Slot Place;

void clear(Place* place) { place->value = 0.0f; }

kernel void clear_all(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  Slot slot;
  clear(&slot);
  values[index] = slot.value;
}
