// Log decays are clamped here: exp is 0 in f32 from -104 on, and g_cumsum keeps its digits.
#pragma once
#include "core/parameters.h"

GDN_CONSTANT float kLowestLogDecay = -104.0f;
