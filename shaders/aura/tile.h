#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kTokensOfTile = 128;  // tokens that share the means of channels: slots 0 .. 127 of a cache, and so on
