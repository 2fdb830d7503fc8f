#pragma once
#include "layers/convolution.h"

GDN_CONSTANT int kConvolutionBwdTokens = 128;  // per threadgroup
