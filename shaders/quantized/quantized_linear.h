#pragma once
#include "experts/few_rows.h"

GDN_CONSTANT int kLinearSimdgroups = 8;
GDN_CONSTANT int kLinearRows = kLinearSimdgroups * kRowsOfHalf * 2;  // rows of W per threadgroup
