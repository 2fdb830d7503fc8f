// Log decays are clamped at this value. In f32, exp is 0 from -104 on, so the clamp changes no decay; it keeps the
// digits of g_cumsum.
#pragma once
#include "core/parameters.h"

GDN_CONSTANT float kLowestLogDecay = -104.0f;
