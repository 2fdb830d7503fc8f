#pragma once
#include "layers/convolution.h"

// The numbers of channels and tokens that a threadgroup owns.
GDN_CONSTANT int kChannelFirstTokens = 64;
GDN_CONSTANT int kChannelFirstChannels = 32;
