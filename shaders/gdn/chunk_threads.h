// The kernels that own one chunk: two threads a token, a simdgroup for each 16 tokens.
#pragma once

constexpr int chunk_threads(int chunk_size) { return 2 * chunk_size; }
