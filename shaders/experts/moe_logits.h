#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kLogitsExperts = 4;  // experts per threadgroup
GDN_CONSTANT int kLogitsSimdgroups = 8;
GDN_CONSTANT int kLogitsTokens = 8;  // most tokens per threadgroup; their sums fit in a thread's registers
