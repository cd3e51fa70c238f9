// Limits how often something is done within any hour.
#pragma once

#include <deque>

namespace tessera {

class HourlyLimit {
 public:
  explicit HourlyLimit(int most) : most_(most) {}

  /// Counts one more use at `now`, in seconds on a monotonic clock. Returns false, and counts nothing, if the last hour
  /// has had as many as allowed.
  bool take(double now) {
    constexpr double kHour = 3600.0;
    while (!times_.empty() && now - times_.front() > kHour) times_.pop_front();
    if (static_cast<int>(times_.size()) >= most_) return false;
    times_.push_back(now);
    return true;
  }
  int most() const { return most_; }

 private:
  int most_;
  std::deque<double> times_;  // uses within the last hour
};

}  // namespace tessera
