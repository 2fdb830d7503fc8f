#include <metal_stdlib>
using namespace metal;

struct Shape {
  float side;
};
struct Square {
  Shape shape;
  float area;
};

kernel void areas(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  Square square;
  square.shape.side = values[index];
  square.area = square.shape.side * square.shape.side;
  values[index] = square.area;
}
