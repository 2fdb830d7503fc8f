// A setting of one thread for the length of a block, as in Python's `with`. Blocks nest, and the innermost one holds.
// Python may end a block on another thread, or before a block inside it: generators, executors and the garbage
// collector do. Such an end takes away that block's setting, in the thread that started it, and nothing else.
#pragma once
#include <c10/util/Exception.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

namespace torch_gdn {

template <typename Setting>
class Block {
 public:
  explicit Block(Setting setting) : entry_(std::make_shared<Entry>(std::move(setting))) {}
  ~Block() { end(); }
  Block(const Block&) = delete;

  void start() {
    TORCH_CHECK(!has_started_.exchange(true), "torch_gdn: expected a block that has not started, got one that has");
    innermost();  // drops entries that have ended
    entries().push_back(entry_);
  }
  void end() { entry_->has_ended = true; }  // on any thread

  // Returns the calling thread's setting, or nullptr outside of every block. It stays valid until the next call on this
  // thread.
  static const Setting* innermost() {
    auto& open = entries();
    while (!open.empty() && open.back()->has_ended) open.pop_back();
    return open.empty() ? nullptr : &open.back()->setting;
  }

 private:
  struct Entry {
    explicit Entry(Setting setting) : setting(std::move(setting)) {}
    const Setting setting;
    std::atomic<bool> has_ended = false;
  };

  static std::vector<std::shared_ptr<Entry>>& entries() {
    thread_local std::vector<std::shared_ptr<Entry>> entries;
    return entries;
  }

  std::shared_ptr<Entry> entry_;  // the thread keeps it too, because another thread may destroy the block
  std::atomic<bool> has_started_ = false;
};

}  // namespace torch_gdn
