// What the harness needs in addition to the shaders: a pattern in all shared memory, a check whether it is still there,
// and a fault for each tool of compute-sanitizer to find.
extern "C" __global__ void fill_shared(unsigned pattern, int words) {
  extern __shared__ volatile unsigned memory[];
  for (int i = threadIdx.x; i < words; i += blockDim.x) memory[i] = pattern;
  __syncthreads();
  const long long start = clock64();
  while (clock64() - start < 20000) {}  // until every multiprocessor has a block
}

extern "C" __global__ void __launch_bounds__(128) count_shared(unsigned pattern, unsigned* count) {
  __shared__ unsigned memory[8192];
  unsigned same = 0;
  for (int i = threadIdx.x; i < 8192; i += 128) same += ((volatile unsigned*)memory)[i] == pattern;
  atomicAdd(count, same);
}

extern "C" __global__ void __launch_bounds__(128) fault_of_memcheck(float* x) { x[threadIdx.x + 1] = 1.0f; }

extern "C" __global__ void __launch_bounds__(128) fault_of_initcheck(float* x) { x[threadIdx.x] += 1.0f; }

extern "C" __global__ void __launch_bounds__(128) fault_of_racecheck(float* x) {
  __shared__ float tile[128];
  tile[threadIdx.x] = float(threadIdx.x);
  x[threadIdx.x] = tile[127 - threadIdx.x];  // a barrier is missing before this
}

extern "C" __global__ void __launch_bounds__(128) fault_of_synccheck(float* x) {
  if (threadIdx.x % 32 < 16) __syncthreads();
  x[threadIdx.x] = 1.0f;
}
