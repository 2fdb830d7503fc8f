#pragma once
#include "core/parameters.h"

// A simdgroup multiplies this many rows of each of its two matrices. Its registers hold a sum for each row and vector,
// and 16 bytes of codes with their scales for each row. On an H100, 4 rows instead of 2 take 120 registers per thread
// instead of 86 for one vector, and were faster only for 8,192 columns (26 us instead of 30).
GDN_CONSTANT int kRowsOfHalf = 2;
