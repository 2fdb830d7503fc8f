// An event marks a point of the stream, and records the time when commands reach it.
#pragma once
#include <memory>

namespace simulator {

class Event {
 public:
  void record();       // marks this point of the stream, and commits
  bool query() const;  // returns whether it was reached; true if no point was recorded
  void synchronize() const;
  double milliseconds_until(const Event& later) const;

 private:
  struct Reached;
  std::shared_ptr<Reached> last_;
};

}  // namespace simulator
