#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kWindowBits = 6;  // bits of a trellis code's window, which choose a value's entry of the codebook
