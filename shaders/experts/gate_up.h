// What the two kernels of gate and up share.
#pragma once
#include "experts/parameters.h"
#include "experts/weights.h"

METAL_FUNC float silu_product(float gate, float up) { return gate / (1.0f + exp(-gate)) * up; }

// The rows of gate and of up of one expert, from row `first` on.
template <typename T, int Bits, int Width>
struct GateUpWeights {
  Weights<T, Bits, Width> gate;
  Weights<T, Bits, Width> up;
};

// Of w_gate_up [E, 2 I, D]: the rows of gate lie before those of up.
template <int Width, typename T, int Bits>
METAL_FUNC GateUpWeights<T, Bits, Width> rows_of_expert(thread const Matrix<T, Bits>& both, int width, int first) {
  GateUpWeights<T, Bits, Width> weights;
  weights.gate = rows_of<Width>(both, width, first);
  weights.up = rows_of<Width>(both, 2 * width, width + first);
  return weights;
}
