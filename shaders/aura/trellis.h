// What the encoders of trellis codes share, those of Metal and of the CPU.
#pragma once
#include "aura/window.h"

GDN_CONSTANT int kReach = 16;       // values on each side of a stream's joint that the encoder's first pass reads
GDN_CONSTANT int kHeldChoices = 8;  // in a word, 4 bits each
