#pragma once
#include "layers/convolution.h"

GDN_CONSTANT int kConvolutionTokens = 32;  // per threadgroup
