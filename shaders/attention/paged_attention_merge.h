#pragma once
#include "attention/paged_attention.h"

GDN_CONSTANT int kMergeRows = 4;  // of a threadgroup: one a simdgroup
