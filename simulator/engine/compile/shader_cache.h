// Files kept between runs, named by the content of all that went into them.
#pragma once
#include <filesystem>
#include <string>

namespace simulator {

// SHA-256, as hexadecimal digits.
std::string content_hash(const std::string& content);

// $TORCH_GDN_CACHE/shaders, else ~/.cache/torch_gdn/shaders. Exists when this returns.
std::filesystem::path cache_directory();

std::string read_file(const std::filesystem::path& path);

// A file under a name of its own, deleted unless publish() gives it its final one. Processes that make the same file at
// the same time each write their own, and the last rename wins.
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
