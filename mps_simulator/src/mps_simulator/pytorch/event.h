// An event is a point of the stream, and the time when commands reach it.
#pragma once
#include <memory>

namespace simulator {

class Event {
 public:
  void record();       // marks this point of the stream, and commits
  bool query() const;  // returns whether it was reached; true if nothing was recorded
  void synchronize() const;
  double milliseconds_until(const Event& later) const;

 private:
  struct Reached;
  std::shared_ptr<Reached> last_;
};

}  // namespace simulator
