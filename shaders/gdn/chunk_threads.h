// The threads of the kernels that own one chunk: one simdgroup for 16 tokens.
#pragma once

constexpr int chunk_threads(int chunk_size) { return 2 * chunk_size; }
