#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kTokensOfTile = 128;  // that share a mean of each channel: slots 0 .. 127 of a cache, and so on
