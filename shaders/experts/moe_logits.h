#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kLogitsExperts = 4;  // of a threadgroup
GDN_CONSTANT int kLogitsSimdgroups = 8;
GDN_CONSTANT int kLogitsTokens = 8;  // of a threadgroup, at most: its sums fit a thread's registers
