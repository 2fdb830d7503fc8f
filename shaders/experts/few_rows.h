#pragma once
#include "core/parameters.h"

// Rows of each of its two matrices that a simdgroup multiplies with up to `most` vectors. Its registers hold a sum for
// each row and vector, and the codes and scales of each row.
constexpr int rows_of_half(int most) { return most <= 2 ? 4 : 2; }
