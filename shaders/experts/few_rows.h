#pragma once
#include "core/parameters.h"

// Rows of each of its two matrices that a simdgroup multiplies. Registers hold a sum for each row and vector, and 16
// bytes of codes and the scales of each row: twice as many rows took 120 registers of a thread on an NVIDIA GPU, and
// were no faster.
GDN_CONSTANT int kRowsOfHalf = 2;
