#pragma once
// Comparing what the ranks of a mesh have with what one rank has: tensor by tensor, with the factor
// that tells which reduction is wrong.

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "moesh/comm/mesh.h"
#include "moesh/fsdp/param.h"
#include "moesh/nn/routing.h"
#include "moesh/types/token.h"

namespace moesh::verify {

/// Whole tensors by name, in forward order. Names of gradients are those of gradient_name.
struct NamedTensors {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  /// The noise of rounding in each element, and the factor of its error before they are
  /// compared (see verify.h); none: not known, and one.
  std::map<std::string, at::Tensor> noise = {}, weight = {};
  /// By how much some runs that may be as right were off, with signs: what rounding does to the
  /// factor of a tensor; none: not known.
  std::map<std::string, std::vector<at::Tensor>> off = {};
  const at::Tensor& operator[](const std::string& name) const;
};

/// "d(NAME)" in the first step, "step N d(NAME)" in later ones.
std::string gradient_name(const std::string& of, std::int64_t step = 0);
bool is_gradient(const std::string& name);
/// N of "step N ..."; 0 of any other name.
std::int64_t step_of(const std::string& name);

double size_of(const at::Tensor& x);

/// The mean size of a gradient of one step (the root of the mean square of their norms), or of all
/// steps where that is less: a later step may be anything, and not even finite.
double typical_gradient(const NamedTensors& run, std::int64_t step = 0);

/// How many times its noise a tensor may be off: a mesh rounds at other places than one rank, and
/// more often.
constexpr double kNoiseAllowed = 5;
/// The noise of so few elements may be small by chance.
constexpr double kFewElements = 16;

/// Where the tokens of a rank's [.., B, L, D] are in the whole: its first sequence, and their
/// positions. After each B sequences `skipped` of other ranks follow there.
struct TokenOrigin {
  std::int64_t batch;
  PositionRanges positions;
  std::int64_t skipped = 0;
};

/// How far the steps moved a parameter. It is small beside the parameter, and judged for this
/// rank's elements, or for each of its experts, so that one shard or one expert that stays cannot
/// hide behind the others.
struct Movement {
  bool by_expert = false;  // each index of dim 0 is judged by itself
};

/// A rank's part of one tensor, and where it belongs in the whole.
struct RankTensor {
  std::string name;
  at::Tensor value;
  std::function<at::Tensor(const at::Tensor& whole)> place;
  bool exact = false;                      // counts: not one may be off
  std::optional<TokenOrigin> tokens = {};  // of tensors that hold tokens
  /// What |ref| is taken for at least: the size of the terms of a sum that may cancel.
  double floor = 0;
  std::optional<Movement> movement = {};
  bool by_expert = false;  // as that of a movement
};

/// The box of a tensor that a region names.
at::Tensor slice(at::Tensor x, const Region& region);

/// A tensor that differs.
struct Mismatch {
  std::string tensor;
  double error = 0, allowed = 0;  // |delta|, and what the tolerance allows
  bool along = false;             // of delta only the part along the reference, |factor - 1| |ref|
  /// <g, g_ref> / <g_ref, g_ref> on what each rank has; 1 is right. NaN: this rank has none of it.
  std::vector<double> factors;
  /// Means of the factors over the ranks of an axis, where each is the same all along that axis.
  std::map<std::string, double> means;
  int worst_rank = 0;
  std::int64_t worst_batch = -1, worst_position = -1;  // of tensors that hold tokens
  /// error / allowed; infinite where nothing is allowed and something differs.
  double ratio() const;
  std::string describe(const MeshShape& mesh) const;
};

/// The findings of all ranks, collected by name. A rank compares what it has: of a pipeline, the
/// tensors of its stages. |delta| <= kNoiseAllowed * noise + tolerance * max(|ref|, 1e-3 * |all
/// gradients| / sqrt(their number)), the last for gradients, of which some are exactly zero.
class Findings {
 public:
  Findings(int num_ranks, const NamedTensors& reference, double tolerance = 0);
  /// Called by every rank, from its own thread.
  void compare(const RankTensor& tensor, int rank);
  /// Called by every rank, after its last tensor: tells the other processes of the world, if there
  /// are any.
  void exchange(comm::Group& world, at::Device device);
  /// In forward order: the first is nearest to the cause.
  std::vector<Mismatch> mismatches(const MeshShape& shape) const;
  /// The largest ratio of all tensors, and which one has it; 0 and none where nothing differs at
  /// all.
  struct Worst {
    double ratio = 0;
    std::string tensor;
  };
  Worst worst() const;
  /// Tensors whose noise allows an error of more than half of their size along themselves.
  std::int64_t num_vague() const;

 private:
  struct Finding {
    double error = 0, allowed = 0, along = 0, vague = 0;
    double factor = 1, batch = -1, position = -1;
    double compared = 0;  // 1: by this rank
    double ratio() const;
  };
  Finding judge(const RankTensor& tensor, int rank) const;
  /// Judges some of the elements that a rank has.
  Finding judge_unit(const RankTensor& tensor, const std::function<at::Tensor(at::Tensor)>& unit,
                     const at::Tensor& value) const;
  /// By name, in forward order.
  std::vector<Mismatch> collect() const;
  /// Why what was compared does not say that the tensor is right: some rank that should have has
  /// not. Empty: all have.
  std::string left_out(std::size_t place, const MeshShape& shape) const;

  int num_ranks_;
  const NamedTensors& reference_;
  double tolerance_, floor_;
  mutable std::mutex mutex_;
  std::map<std::string, std::size_t> places_;  // of the names in the reference
  /// [rank][place]; `compared` says which are there.
  std::vector<std::vector<Finding>> by_rank_;
};

// Observes forward passes for verify: the routing, recorded on one mesh and replayed on another,
// and the first and the last tensor of the model.

/// The choices of a step by global token, since near ties flip between roundings. Ranks write and
/// read their own tokens.
struct RoutingRecord : nn::StepRouting {
  std::atomic<std::int64_t> num_flipped =
      0;                                   // choices that would have been different in the replay
  std::atomic<double> largest_margin = 0;  // of the choice scores, among them
  RoutingRecord(std::int64_t num_layers, std::int64_t num_tokens, std::int64_t top_k);
  void forget_flips() { num_flipped = 0, largest_margin = 0; }
};

/// The probe of one rank.
class VerifyProbe final : public nn::RoutingProbe {
 public:
  RoutingRecord* flips = nullptr;  // gets the choices that are replayed and would be others
  /// For each micro-batch since begin_step: the stream that entered the first block, which has its
  /// gradient after backward, and the logits.
  std::vector<at::Tensor> inputs, logits_BLV;

  void begin_step() { inputs.clear(), logits_BLV.clear(); }
  /// The choices of another run.
  void replay_from(RoutingRecord* other) { replay = flips = other; }

  void on_input(const at::Tensor& x_BLD) override;
  at::Tensor on_choice(const nn::Choice& choice) override;
  bool wants_logits() const override { return true; }
  void on_logits(const at::Tensor& logits) override { logits_BLV.push_back(logits.detach()); }
};

}  // namespace moesh::verify
