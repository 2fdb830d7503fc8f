// What the two kernels of gate and up share.
#pragma once
#include "experts/parameters.h"
#include "experts/weights.h"

METAL_FUNC float silu_product(float gate, float up) { return gate / (1.0f + exp(-gate)) * up; }

// The rows of gate and of up of one expert, from row `first` on. `expert` of E: the shared one.
template <typename T, int Width>
struct GateUpWeights {
  DenseWeights<T, Width> gate;
  DenseWeights<T, Width> up;

  METAL_FUNC void locate(
      device const T* w_gate_up,
      device const T* shared_gate_proj,
      device const T* shared_up_proj,
      constant MoeGateUpParameters& parameters,
      int expert,
      int first) {
    if (expert == parameters.pairs.experts) {
      gate = dense_weights<Width>(shared_gate_proj, parameters.shared_gate_stride, parameters.IS, first);
      up = dense_weights<Width>(shared_up_proj, parameters.shared_up_stride, parameters.IS, first);
      return;
    }
    device const T* weights = w_gate_up + expert * parameters.expert_stride;
    gate = dense_weights<Width>(weights, parameters.row_stride, parameters.I, first);
    up = dense_weights<Width>(
        weights + parameters.I * parameters.row_stride, parameters.row_stride, parameters.I, first);
  }
};
