#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kSumRows = 8;  // simdgroups per threadgroup

struct SumPartialsParameters {
  int32_t rows, elements;  // of partials [rows, elements, columns]
  int32_t columns;
};
