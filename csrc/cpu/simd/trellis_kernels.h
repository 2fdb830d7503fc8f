// Viterbi's algorithm for AURA's trellis codes. It works on raw memory, in the best ISA variant for this machine.
#pragma once
#include <cstdint>

#include "shaders/aura/trellis.h"

namespace torch_gdn::cpu {

constexpr int64_t kMostRows = 16;  // most rows that are encoded together
constexpr int64_t kMostStates = 16;

// Value d of row r is x[d * rows + r]. `choices` has kMostStates words for each row and kHeldChoices values.
struct TrellisRows {
  const float *x, *labels;
  int64_t D, bits;
  uint32_t* choices;
  uint8_t* windows;  // the result, with the layout of x
};

struct TrellisKernels {
  int64_t rows;  // at most kMostRows
  // Finds the windows of the ring whose labels are nearest to the values of each row.
  void (*nearest_windows)(const TrellisRows& rows);
};
const TrellisKernels& trellis_kernels();

}  // namespace torch_gdn::cpu
