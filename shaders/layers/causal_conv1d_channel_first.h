#pragma once
#include "layers/convolution.h"

// The channels and tokens of a threadgroup.
GDN_CONSTANT int kChannelFirstTokens = 64;
GDN_CONSTANT int kChannelFirstChannels = 32;
