// refused: 'Square' is derived: Metal has no derived classes
#include <metal_stdlib>
using namespace metal;

struct Shape {
  float side;
};
struct Square : Shape {
  float area;
};

kernel void areas(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  Square square;
  square.side = values[index];
  square.area = square.side * square.side;
  values[index] = square.area;
}
