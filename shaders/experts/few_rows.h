#pragma once
#include "core/parameters.h"

// A simdgroup multiplies this many rows of each of its two matrices. Its registers hold a sum for each row and vector,
// and 16 bytes of codes with their scales for each row. On an H100, 4 rows were slower than 2 in every size.
GDN_CONSTANT int kRowsOfHalf = 2;
