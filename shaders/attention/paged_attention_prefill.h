#pragma once
#include "attention/paged_attention.h"

GDN_CONSTANT int kPrefillRows = 8;  // per simdgroup
