// A log decay below this counts as this: its exp is 0 in f32 all the same, and the cumulative sum keeps its digits.
#pragma once
#include "core/parameters.h"

GDN_CONSTANT float kLowestLogDecay = -104.0f;
