// The number of threads in a kernel whose threadgroups own one chunk: one simdgroup per 16 tokens.
#pragma once

constexpr int chunk_threads(int chunk_size) { return 2 * chunk_size; }
