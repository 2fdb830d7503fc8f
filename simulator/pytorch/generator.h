// An mps generator that owns a CPU engine: random ops run on the CPU with it, so a seed gives the tokens it gives
// there.
#pragma once
#include <ATen/core/Generator.h>

namespace simulator {

const at::Generator& default_generator();
at::Generator new_generator();
at::Generator cpu_engine(const at::Generator& generator);  // itself, where it is not on mps

}  // namespace simulator
