// The kernel adds this to the squared length of q and k when it normalises them, so that rows of zeros stay zero.
#pragma once
#include "core/parameters.h"

GDN_CONSTANT float kNormEps = 1e-6f;
