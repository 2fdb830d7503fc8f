#include "figures.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace simulator {
namespace {

struct Record {
  std::mutex mutex;
  std::map<std::string, KernelFigures> by_kernel;
};

Record& record() {
  static Record instance;
  return instance;
}

}  // namespace

void add_figures(KernelFigures& sum, const KernelFigures& more) {
  for (const Count& count : kCounts) sum.*count.value += more.*count.value;
  for (size_t kind = 0; kind < kOperationKinds; ++kind) {
    sum.operations[kind] += more.operations[kind];
    sum.operations_issued[kind] += more.operations_issued[kind];
  }
  sum.threadgroup_memory = std::max(sum.threadgroup_memory, more.threadgroup_memory);
  sum.seconds += more.seconds;
}

void record_figures(const std::string& kernel, const KernelFigures& more) {
  Record& all = record();
  std::lock_guard lock(all.mutex);
  add_figures(all.by_kernel[kernel], more);
}

void reset_figures() {
  Record& all = record();
  std::lock_guard lock(all.mutex);
  all.by_kernel.clear();
}

std::map<std::string, KernelFigures> figures() {
  Record& all = record();
  std::lock_guard lock(all.mutex);
  return all.by_kernel;
}

}  // namespace simulator
