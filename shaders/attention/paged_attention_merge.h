#pragma once
#include "attention/paged_attention.h"

GDN_CONSTANT int kMergeRows = 4;  // per threadgroup, one per simdgroup
