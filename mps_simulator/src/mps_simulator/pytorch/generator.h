// An mps generator that owns a CPU engine, so that a seed gives the same numbers as on the CPU.
#pragma once
#include <ATen/core/Generator.h>

namespace simulator {

const at::Generator& default_generator();
at::Generator new_generator();
at::Generator cpu_engine(const at::Generator& generator);  // returns the generator itself if it is not on mps

}  // namespace simulator
