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
  sum.dispatches += more.dispatches;
  sum.threadgroups += more.threadgroups;
  sum.threads += more.threads;
  sum.device_bytes_read += more.device_bytes_read;
  sum.device_bytes_written += more.device_bytes_written;
  sum.threadgroup_bytes_read += more.threadgroup_bytes_read;
  sum.threadgroup_bytes_written += more.threadgroup_bytes_written;
  sum.barriers += more.barriers;
  sum.collectives += more.collectives;
  sum.matrix_multiplies += more.matrix_multiplies;
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
