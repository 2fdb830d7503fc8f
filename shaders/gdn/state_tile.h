// The kernels that carry a state through a sequence: a threadgroup of 4 simdgroups owns 32 columns of V of one head.
#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kStateColumns = 32;
GDN_CONSTANT int kStateThreads = 128;
