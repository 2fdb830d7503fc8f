// What the codes are, on every device.
#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kWindowBits = 6;  // bits of a trellis code's window, which choose a value's entry of the codebook

GDN_CONSTANT int kReach = 16;       // the encoder's first pass reads so many values on each side of the stream's joint
GDN_CONSTANT int kHeldChoices = 8;  // choices per word, 4 bits each

GDN_CONSTANT int kTokensOfTile = 128;  // tokens that share the means of channels: slots 0 .. 127 of a cache, and so on
