// All kernels of one instruction set, in the order in which they need each other.
// clang-format off
#include "products.h"
#include "rows.h"
#include "chunk.h"
#include "recurrent.h"
// clang-format on
