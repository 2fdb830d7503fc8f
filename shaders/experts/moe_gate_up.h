#pragma once
#include "experts/few_rows.h"

GDN_CONSTANT int kGateUpRows = 32;  // of gate, and as many of up, in a threadgroup

constexpr int gate_up_simdgroups(int most) { return kGateUpRows / rows_of_half(most); }
