#pragma once
// What rounding does to each tensor of a run, which tells how far a mesh may be off. Nothing here
// compares with another dtype, but for unexplained: a fault of one dtype does not widen what is
// allowed in it.

#include "moesh/config/config.h"
#include "moesh/models/model.h"
#include "moesh/verify/parity.h"

namespace moesh::verify {

std::string movement_name(const std::string& param);

/// Makes a run on one rank another one, which is as near to it as rounding allows: every weight
/// begins up to one rounding away, so that everything after it is rounded otherwise.
class Nearby {
 public:
  Nearby(const NamedTensors& run, at::ScalarType dtype, std::uint64_t seed)
      : run_(run), dtype_(dtype), seed_(seed), typical_(typical_gradient(run)) {}
  void move_weights(models::Model& model) const;
  /// AdamW moves an element by about the learning rate, however small its gradient is: one whose
  /// gradient is noise goes either way, and later steps see it. That happens to few elements, and
  /// to others in each run, so gradients are moved as far as they may be off before they are
  /// applied: then all such elements go either way.
  void move_gradients(models::Model& model, std::int64_t step) const;
  /// 1 or -1 for each element.
  at::Tensor signs(const Stored& w) const;

 private:
  at::Tensor draw(const Stored& w, std::int64_t step) const;  // in [-1, 1)
  const NamedTensors& run_;
  at::ScalarType dtype_;
  std::uint64_t seed_;
  double typical_;
};

/// How many runs nearby tell the noise.
constexpr std::uint64_t kNumNearby = 3;

/// The noise of each tensor is the largest distance of the runs nearby, element by element. They
/// are few samples, and may be near by chance: a gradient has at least the median of what all
/// gradients have, relative to its size, and any tensor what storing it costs. The noise of a
/// gradient norm is that of all its gradients together.
void set_noise(NamedTensors& run, at::ScalarType dtype, const std::vector<NamedTensors>& nearby);

/// The noise of parameters and of their movements follows from that of the gradients: it is what
/// the update rule makes of gradients that are as far off as they may be, for all signs of the
/// steps. Where a gradient may have either sign, the rule may do anything, and only the gradient is
/// compared: the weight of these elements is 0. Errors of a movement are taken relative to what is
/// allowed for that very element.
void set_movement_noise(NamedTensors& run, const config::Config& one_rank, std::int64_t steps);

/// What rounding does not explain, of runs in `dtype` (a run and those nearby): float64 tells how
/// many roundings of its own each tensor of the first step may be off, and in a narrower dtype it
/// may be off by as many of those. So no run in that dtype is noisier, either.
std::vector<Mismatch> unexplained(const std::vector<NamedTensors>& runs, at::ScalarType dtype,
                                  const NamedTensors& in_float64);
constexpr double kMostRoundings = 4;

}  // namespace moesh::verify
