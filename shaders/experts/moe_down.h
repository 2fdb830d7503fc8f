#pragma once
#include "experts/few_rows.h"

GDN_CONSTANT int kDownSimdgroups = 8;
GDN_CONSTANT int kDownRows = kDownSimdgroups * kRowsOfHalf * 2;  // per threadgroup
