// Added to the squared length of q and k if the kernel normalises them, so that rows of zeros stay zero.
#pragma once
#include "core/parameters.h"

GDN_CONSTANT float kNormEps = 1e-6f;
