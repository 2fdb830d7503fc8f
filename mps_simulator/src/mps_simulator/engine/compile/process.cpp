#include "process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <stdexcept>

extern char** environ;

namespace simulator {
namespace {

struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error(std::string("pipe: ") + std::strerror(errno));
    read = ends[0], write = ends[1];
  }
  Pipe(const Pipe&) = delete;
  ~Pipe() {
    close(read);
    close_write();
  }
  void close_write() {
    if (write >= 0) close(write);
    write = -1;
  }
};

// Reads both pipes until the program closes them.
void drain(const Pipe& output, const Pipe& errors, ProcessResult& result) {
  std::array<pollfd, 2> files{{{output.read, POLLIN, 0}, {errors.read, POLLIN, 0}}};
  std::array<std::string*, 2> texts{&result.output, &result.errors};
  std::array<char, 65536> buffer;
  for (int open = 2; open > 0;) {
    if (poll(files.data(), files.size(), -1) < 0) {
      if (errno == EINTR) continue;
      throw std::runtime_error(std::string("poll: ") + std::strerror(errno));
    }
    for (size_t i = 0; i < files.size(); ++i) {
      if (files[i].fd < 0 || !files[i].revents) continue;
      const ssize_t count = read(files[i].fd, buffer.data(), buffer.size());
      if (count > 0) {
        texts[i]->append(buffer.data(), static_cast<size_t>(count));
      } else if (count == 0 || errno != EINTR) {
        files[i].fd = -1;
        --open;
      }
    }
  }
}

}  // namespace

ProcessResult run_process(const std::vector<std::string>& arguments) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  Pipe output, errors;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, output.write, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, errors.write, STDERR_FILENO);
  pid_t child = 0;
  const int failure = posix_spawn(&child, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failure) throw std::runtime_error("cannot run " + arguments[0] + ": " + std::strerror(failure));
  output.close_write();
  errors.close_write();
  ProcessResult result;
  drain(output, errors, result);
  while (waitpid(child, &result.status, 0) < 0 && errno == EINTR) continue;
  return result;
}

}  // namespace simulator
