#pragma once
// A pipeline schedule is data: for each rank of pp, the actions that it goes through, in order.
// Pure functions make them; check() and simulate() take any list. No tensor is
// here.
//   p  ranks of pp        v  stages of a rank        m  micro-batches of an optimizer step

#include <optional>
#include <string>
#include <vector>

namespace moesh::pipeline {

enum class ActionKind {
  forward,
  backward,         // gradients of inputs and of weights
  backward_input,   // gradients of inputs, which the stage before waits for
  backward_weight,  // gradients of weights, which nobody waits for
};

struct Action {
  ActionKind kind;
  int stage;
  int micro_batch;
  /// A forward that is joined with the action after it, a backward of another micro-batch: both are
  /// under way at once, and while rows of one travel the rank computes the other.
  bool joins_next = false;
  bool operator==(const Action&) const = default;
};

/// "F2.0": forward of stage 2 for micro-batch 0. B is backward, I its half for the inputs, W that
/// for the weights.
std::string to_string(const Action& action);
/// "forward of stage 2 for micro-batch 0"
std::string describe(const Action& action);
/// How many actions of a list begin together at action i: 2 where it is joined with the next one.
size_t num_together(const std::vector<Action>& list, size_t i);
/// Whether it makes the gradients of its inputs, by itself or with those of the weights.
bool is_input_backward(const Action& action);

struct Schedule {
  int num_stages = 1, num_micro_batches = 1;
  std::vector<int> rank_of;                // of each stage
  std::vector<std::vector<Action>> ranks;  // the actions of each
  bool has_backward = true;                // false: only forwards

  int num_ranks() const { return static_cast<int>(ranks.size()); }
  /// The stage whose output an action takes, and that which takes the output of this one; none at
  /// the ends of the pipeline, and for gradients of weights.
  std::optional<int> source(const Action& action) const;
  std::optional<int> target(const Action& action) const;
  int rank_with(int stage) const { return rank_of[static_cast<size_t>(stage)]; }
};

/// All forwards, then all backwards: m activations are alive on every rank.
Schedule gpipe(int p, int m);

/// Rank r runs p - r forwards ahead, then a backward after each forward: the same bubble, and at
/// most p activations alive. Joined, it runs 2 (p - r) ahead and holds as many: a forward cannot be
/// one with the backward that waits for what the next rank makes of it.
Schedule one_f_one_b(int p, int m, bool joined = false);

/// 1F1B over v stages a rank, stage s on rank s % p: the bubble is v times as short, for v times as
/// many messages. Micro-batches go in groups of p; where p does not divide m, the first group is
/// larger. Joined, it runs one forward further ahead.
Schedule interleaved_1f1b(int p, int v, int m, bool joined = false);

/// 1F1B with the weight half of backward put off, by r micro-batches on rank r (ZB-H1 of Qi et al.,
/// 2023): a third of the bubble, in the memory of 1F1B's first rank on every rank.
Schedule zero_bubble(int p, int m);

/// Two stages a rank, down and up again in a V: stages r and 2p - 1 - r on rank r, so that the
/// loss arises where the first forward was (ZB-V of the same authors). No bubble where both halves
/// of backward take as long as forward, and m >= 2p - 1.
Schedule zbv(int p, int m);

/// The stages of zbv, in the order of DualPipeV (DeepSeek, 2025): in its main part every forward of
/// one stage of a rank stands beside a backward of the other, and in some of the backwards at both
/// ends that for the weights is put off.
Schedule dualpipev(int p, int m, bool joined = false);

/// The names that configurations know, as in "1f1b".
const std::vector<std::string>& schedule_names();
/// Those of schedules that can be joined.
const std::vector<std::string>& joined_schedule_names();
bool can_be_joined(const std::string& name);
/// Whether some of its backwards are in two halves.
bool has_halves(const std::string& name);

/// Stages of a rank that a schedule needs: 1, 2, or `any` where any number from 2 on will do.
int stages_of_a_rank(const std::string& name, int any = 0);
/// In that case, where nobody says how many.
constexpr int kStagesOfARank = 2;

/// By name; throws Error (config) when there is no such schedule, or not with so many stages, or
/// not joined. Joined, forwards and backwards that stand side by side are under way at once.
Schedule make_schedule(const std::string& name, int p, int v, int m, bool joined = false);

/// Only its forwards, in their order: what an evaluation runs.
Schedule forwards_of(Schedule schedule);

/// Throws Error (config) that names rank and action unless every stage does every micro-batch
/// exactly once, forward and backward (whole, or both halves; or none, where there are forwards
/// alone), on the rank that has the stage, and each rank does forward before backward and inputs
/// before weights; and where an action is joined, it is a forward before a backward of another
/// micro-batch.
void check(const Schedule& schedule);

}  // namespace moesh::pipeline
