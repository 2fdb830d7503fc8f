#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kWindowBits = 6;  // of a trellis code, which choose a value's entry of the codebook
