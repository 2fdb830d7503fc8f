#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kFewPairs = 96;  // of a token and an expert, which the kernels for few tokens take: 3 a lane
