#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kSumThreads = 256;
