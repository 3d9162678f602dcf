#include "moesh/pipeline/lanes.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace moesh::pipeline {
namespace {

class LaneClock {
 public:
  explicit LaneClock(double slower) : slower_(slower) {}

  double now() const { return now_; }
  void wait_until(double time) { now_ = std::max(now_, time); }
  void compute(double seconds) {
    const double moving = std::max(0.0, *std::ranges::max_element(free_) - now_),
                 meanwhile = std::min(seconds, moving / (1 + slower_));
    now_ += seconds + slower_ * meanwhile;
  }
  // When the message has come.
  double send(const LaneStep& step) {
    double& free = free_[static_cast<size_t>(step.link)];
    free = std::max(now_, free) + step.message;
    return free;
  }

 private:
  double slower_, now_ = 0;
  std::array<double, 2> free_{};  // from when on each link is idle
};

}  // namespace

double seconds_in_turns(const std::vector<Lane>& lanes, double slower) {
  LaneClock clock(slower);
  std::vector<size_t> next(lanes.size());
  std::vector<double> awaited(lanes.size());
  const auto is_left = [&](size_t lane) { return next[lane] < lanes[lane].size(); };
  size_t num_left = 0;
  for (const Lane& lane : lanes) num_left += lane.size();
  for (size_t lane = 0; num_left > 0; lane = (lane + 1) % lanes.size()) {
    clock.wait_until(awaited[lane]);
    for (bool has_turn = true; has_turn && is_left(lane); --num_left) {
      const LaneStep& step = lanes[lane][next[lane]++];
      clock.compute(step.compute);
      if (step.message == 0) continue;
      awaited[lane] = clock.send(step);
      if (step.takes_turns)
        has_turn = false;
      else
        clock.wait_until(awaited[lane]);
    }
  }
  for (const double time : awaited) clock.wait_until(time);
  return clock.now();
}

double seconds_apart(const Lane& lane) {
  return std::accumulate(lane.begin(), lane.end(), 0.0, [](double sum, const LaneStep& step) {
    return sum + step.compute + step.message;
  });
}

}  // namespace moesh::pipeline
