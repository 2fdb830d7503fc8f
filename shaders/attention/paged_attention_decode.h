#pragma once
#include "attention/paged_attention.h"

GDN_CONSTANT int kDecodeRows = 8;        // of a threadgroup
GDN_CONSTANT int kDecodeSimdgroups = 4;  // of a threadgroup; each takes other keys
