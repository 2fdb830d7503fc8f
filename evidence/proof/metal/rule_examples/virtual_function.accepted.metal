#include <metal_stdlib>
using namespace metal;

struct Shape {
  float side;
  float area() const { return side * side; }
};

kernel void areas(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  Shape shape;
  shape.side = values[index];
  values[index] = shape.area();
}
