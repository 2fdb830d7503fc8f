#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kFewPairs = 96;  // most pairs of a token and an expert in the kernels for few tokens: 3 per lane
