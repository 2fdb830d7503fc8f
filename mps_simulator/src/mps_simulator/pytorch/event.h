// Events of the stream: a point that commands reach, and when.
#pragma once
#include <memory>

namespace simulator {

class Event {
 public:
  void record();       // marks this point of the stream, and commits
  bool query() const;  // reached? true where nothing was recorded
  void synchronize() const;
  double milliseconds_until(const Event& later) const;

 private:
  struct Reached;
  std::shared_ptr<Reached> last_;
};

}  // namespace simulator
