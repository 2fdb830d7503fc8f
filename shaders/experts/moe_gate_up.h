#pragma once
#include "experts/few_rows.h"

GDN_CONSTANT int kGateUpSimdgroups = 16;
GDN_CONSTANT int kGateUpRows = kGateUpSimdgroups * kRowsOfHalf;  // of gate, and of up, per threadgroup
