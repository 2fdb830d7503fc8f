#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kDequantizeThreads = 128;
GDN_CONSTANT int kDequantizeColumns = 8;  // per thread
