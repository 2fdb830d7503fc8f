// The tile of the kernels that carry a state. A threadgroup of 4 simdgroups owns 32 value columns of a head.
#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kStateColumns = 32;
GDN_CONSTANT int kStateThreads = 128;
