#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "job.h"
#include "mps_simulator/engine/count/figures.h"
#include "mps_simulator/engine/engine.h"
#include "mps_simulator/engine/kernel_abi.h"
#include "worker.h"

namespace simulator {
namespace {

// The stacks of one worker take 130 MB of address space, and up to 2,048 of the 65,530 mappings that Linux allows.
constexpr unsigned kMaxWorkers = 16;

// The first worker runs on the thread that calls execute(). The others run on their own threads.
class Team {
 public:
  // Runs one dispatch at a time. Returns the text of the first fault, or "".
  std::string run(Job& job) {
    grow(job.workers);
    {
      std::lock_guard lock(mutex_);
      job_ = &job;
      wanted_ = running_ = job.workers - 1;
      ++generation_;
    }
    if (job.workers > 1) wake_.notify_all();
    members_[0]->worker.run(job);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    for (unsigned i = 0; i < job.workers; ++i) {
      if (!members_[i]->worker.fault().empty()) return members_[i]->worker.fault();
    }
    return {};
  }

  KernelFigures figures(unsigned workers) const {
    KernelFigures sum;
    for (unsigned i = 0; i < workers; ++i) add_figures(sum, members_[i]->worker.figures());
    return sum;
  }

 private:
  struct Member {
    Worker worker;
    std::thread thread;
  };

  void grow(unsigned count) {
    while (members_.size() < count) {
      const auto index = unsigned(members_.size());
      auto member = std::make_unique<Member>();
      Worker& worker = member->worker;
      if (index > 0) member->thread = std::thread([this, index, &worker] { serve(index, worker); });
      members_.push_back(std::move(member));
    }
  }

  void serve(unsigned index, Worker& worker) {
    uint64_t seen = 0;
    for (;;) {
      Job* job;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return generation_ != seen && index <= wanted_; });
        seen = generation_;
        job = job_;
      }
      worker.run(*job);
      std::lock_guard lock(mutex_);
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::vector<std::unique_ptr<Member>> members_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  unsigned wanted_ = 0, running_ = 0;
  uint64_t generation_ = 0;
};

// The team is never destroyed. Its threads sleep until the process ends. A forked child has none of its parent's
// threads.
Team& team() {
  static Team* instance = nullptr;
  static pid_t owner = 0;
  if (owner != getpid()) {
    instance = new Team;
    owner = getpid();
  }
  return *instance;
}

unsigned worker_count(const Settings& settings, uint64_t threadgroups) {
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  const unsigned wanted = std::min(settings.workers == 0 ? cores : settings.workers, kMaxWorkers);
  return unsigned(std::min<uint64_t>(wanted, threadgroups));
}

uint64_t first_threadgroup(const Dispatch& dispatch, uint64_t parts) {
  const uint64_t count = dispatch.threadgroups.count();
  if (parts == 0 || count % parts != 0) {
    throw Fault("kernel '" + std::string(dispatch.function->kernel->name) + "': settings.parts is " +
                std::to_string(parts) + ", expected a divisor of its " + std::to_string(count) + " threadgroups");
  }
  return count - count / parts;
}

}  // namespace

Job::Job(const Dispatch& dispatch)
    : dispatch(dispatch),
      kernel(*dispatch.function->kernel),
      settings(simulator::settings()),
      threadgroups(dispatch.threadgroups),
      threads(dispatch.threads),
      workers(worker_count(settings, threadgroups.count())) {
  const Size& group = dispatch.threads_per_threadgroup;
  next = first_threadgroup(dispatch, settings.parts);
  if (threads.count() == 0) {
    threads = {threadgroups.width * group.width, threadgroups.height * group.height, threadgroups.depth * group.depth};
  }
}

simulator_uint3 Job::group_size(simulator_uint3 position) const {
  const Size& group = dispatch.threads_per_threadgroup;
  const auto left = [](size_t whole, size_t step, uint32_t index) {
    return uint32_t(std::min(step, whole - index * step));
  };
  return {left(threads.width, group.width, position.x), left(threads.height, group.height, position.y),
          left(threads.depth, group.depth, position.z)};
}

std::string text(simulator_uint3 position) {
  return "(" + std::to_string(position.x) + ", " + std::to_string(position.y) + ", " + std::to_string(position.z) + ")";
}

simulator_uint3 thread_position(uint32_t index, simulator_uint3 size) {
  return {index % size.x, index / size.x % size.y, index / size.x / size.y};
}

Settings& settings() {
  static Settings instance;
  return instance;
}

Dispatch counted(Dispatch dispatch) {
  const Function& function = *dispatch.function;
  dispatch.function = function.program->counted()->function(function.name, function.constants);
  return dispatch;
}

void execute(const Dispatch& encoded) {
  static std::mutex one_at_a_time;
  std::lock_guard lock(one_at_a_time);
  const bool is_detailed = settings().detailed && settings().watch;
  const Dispatch dispatch = is_detailed ? counted(encoded) : encoded;
  validate(dispatch);
  const Stopwatch stopwatch;
  dispatch.function->program->bind(dispatch.function->constants);
  Job job(dispatch);
  std::optional<Layout> layout;
  if (job.settings.watch) job.layout = &layout.emplace(dispatch, job.threadgroups.count(), job.settings.detailed);
  Team& workers = team();
  std::string fault = workers.run(job);
  KernelFigures figures = workers.figures(job.workers);
  if (layout) {
    layout->count_distinct(figures);
    const std::string aliases = layout->end_copies();
    if (fault.empty() && !aliases.empty()) fault = "kernel '" + std::string(job.kernel.name) + "': " + aliases;
  }
  figures.dispatches = 1;
  figures.seconds = stopwatch.seconds();
  record_figures(job.kernel.name, figures);
  if (!fault.empty()) throw Fault(fault);
}

}  // namespace simulator
