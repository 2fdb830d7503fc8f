// Sizes of a trellis code that kernels, host and CPU share.
#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kWindowBits = 6;   // that choose a value's entry of the codebook
GDN_CONSTANT int kReach = 16;       // values on each side of a stream's joint that the encoder's first pass reads
GDN_CONSTANT int kHeldChoices = 8;  // in a word, 4 bits each
