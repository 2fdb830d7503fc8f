// The parts of PyTorch's profiler that the templates of ATen/native/mps/OperationUtils.h call. They trace nothing here.
#include <ATen/mps/MPSProfiler.h>

namespace at::mps {
namespace Profiler {

const std::string BaseInfo::toString(double, double) const { return ""; }
const std::string OperationInfo::toString(double, double) const { return strKey; }
const std::string CpuFbInfo::toString(double, double) const { return strKey; }

struct sigaction MPSProfiler::currentSigint{};
struct sigaction MPSProfiler::previousSigint{};

MPSProfiler::MPSProfiler() = default;
MPSProfiler::~MPSProfiler() = default;
uint64_t MPSProfiler::beginProfileKernel(const void*, const std::string&, bool) { return 0; }
uint64_t MPSProfiler::beginProfileKernel(const void*, const std::string&, const TensorList&) { return 0; }
void MPSProfiler::endProfileKernel(const void*, SyncType) {}

}  // namespace Profiler

Profiler::MPSProfiler& getMPSProfiler() {
  static auto* profiler = new Profiler::MPSProfiler;
  return *profiler;
}

}  // namespace at::mps
