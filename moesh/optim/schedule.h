#pragma once
// The learning rate over the run, as a factor of its peak.

#include <cstdint>
#include <string>
#include <vector>

namespace moesh::optim {

// clang-format off
/// Steps count from 0. Of N steps the first W are warm-up, and the last D decay (cosine, linear:
/// N - W; wsd: decay_ratio of N, rounded):
///   step s < W             (s + 1) / W: never 0, the peak in step W - 1
///   W <= s <= N - D        1
///   N - D < s < N          from 1 down to min_lr_factor, by p = (s - (N - D)) / D:
///                          cosine is (1 + cos(pi p)) / 2, linear and wsd are 1 - p
///   s >= N                 min_lr_factor
/// Only the first step after the run has the floor, so that no step of it is lost to a rate of 0.
/// constant: always 1 after the warm-up.
// clang-format on
struct LrSchedule {
  std::string kind = "cosine";
  std::int64_t num_steps = 0;
  std::int64_t warmup_steps = 0;
  double decay_ratio = 0.1;    // wsd: the last fraction of all steps, in which the rate falls
  double min_lr_factor = 0.0;  // the floor

  void validate() const;
  /// The factor in a step of a valid schedule.
  double factor(std::int64_t step) const;
};

/// What `kind` may be.
const std::vector<std::string>& lr_schedule_names();

}  // namespace moesh::optim
