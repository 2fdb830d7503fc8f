#pragma once
#include "experts/few_rows.h"

GDN_CONSTANT int kDownRows = 32;  // of a threadgroup

constexpr int down_simdgroups(int most) { return kDownRows / (2 * rows_of_half(most)); }
