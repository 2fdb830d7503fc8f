#pragma once
#include "attention/paged_attention.h"

GDN_CONSTANT int kDecodeRows = 8;        // per threadgroup
GDN_CONSTANT int kDecodeSimdgroups = 4;  // per threadgroup; each reads other keys
