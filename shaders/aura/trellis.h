// The encoders of trellis codes on Metal and on the CPU share these constants.
#pragma once
#include "aura/window.h"

GDN_CONSTANT int kReach = 16;       // the encoder's first pass reads so many values on each side of the stream's joint
GDN_CONSTANT int kHeldChoices = 8;  // choices per word, 4 bits each
