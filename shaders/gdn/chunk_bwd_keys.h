#pragma once
#include "gdn/chunk_bwd.h"

GDN_CONSTANT int kBwdKeysRows = 4;  // tokens per threadgroup, one per simdgroup
