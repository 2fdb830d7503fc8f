// Keeps files between runs. The name of a file is a hash of its inputs.
#pragma once
#include <filesystem>
#include <string>

namespace simulator {

std::string content_hash(const std::string& content);

std::string read_file(const std::filesystem::path& path);

// The file is deleted unless it is published. If several processes build the same file at once, each writes its own
// file, and the last rename wins.
class TemporaryFile {
 public:
  TemporaryFile(const std::filesystem::path& directory, const std::string& suffix);
  TemporaryFile(const TemporaryFile&) = delete;
  ~TemporaryFile();
  const std::filesystem::path& path() const { return path_; }
  void write(const std::string& content) const;
  void publish(const std::filesystem::path& as) const;

 private:
  std::filesystem::path path_;
};

}  // namespace simulator
