#pragma once
// The optimizer as the train loop sees it: parameters, the rule of each, and the state that the
// rules declare.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "moesh/optim/rules.h"

namespace moesh::optim {

class Optimizer {
 public:
  using RulePtr = std::shared_ptr<const Rule>;
  /// How a parameter moves: by which rule, and by how much of the learning rate.
  struct RuleChoice {
    RulePtr rule;
    double lr_scale = 1;
    bool operator==(const RuleChoice&) const = default;
  };
  using ChooseRule = std::function<RuleChoice(const ParamList::Entry&)>;

  /// One rule for all parameters, or a way for each: those with the same one move together.
  Optimizer(ParamList params, RulePtr rule);
  Optimizer(ParamList params, const ChooseRule& choose);
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// A step updates every stored value in place from its gradient, and sets the gradients to none.
  /// It has three parts, for a host that does not wait: before, what it knows; then the update,
  /// which only reads numbers of the device; and when those were read, whether it was skipped. A
  /// gradient that is missing is an error, and then no parameter moves.
  void begin_step(double lr);
  /// Float64 scalars: what the gradients are multiplied with, and whether the step is skipped (not
  /// 0). The gradients stay.
  void update(const at::Tensor& factor, const at::Tensor& skip);
  /// A CUDA graph has done the last update once more: what it wrote is newer now, and so are the
  /// copies which that update wrote.
  void note_replayed();
  /// Sets the gradients to none, and counts the step unless it was skipped.
  void end_step(bool skipped);
  /// Sets every gradient to none.
  void zero_grad() { params_.zero_grad(); }

  /// One tensor of the state, for a checkpoint: "layers.0.gate.weight.exp_avg". Writing into
  /// `value` (copy_) restores it.
  struct StateTensor {
    std::string name;
    const Stored* param;
    at::Tensor value;
    bool is_sharded;  // cut and stored like the parameter; if not, the same on all its ranks
  };
  std::vector<StateTensor> state() const;
  /// The number of steps taken, which belongs to the state: AdamW's bias correction depends on it.
  std::int64_t num_steps() const { return num_steps_; }
  void set_num_steps(std::int64_t n);

  const ParamList& params() const { return params_; }
  /// As it was given: how other parameters would move.
  const ChooseRule& choose() const { return choose_; }

 private:
  struct ParamState {  // for one parameter
    std::size_t way;
    std::vector<StateSpec> specs;
    std::vector<at::Tensor> values;
    bool writes_copy = false;  // the last update did
  };

  ParamList params_;
  ChooseRule choose_;
  std::vector<RuleChoice> ways_;  // each once, in the order of the parameters
  std::vector<ParamState> kept_;  // by parameter
  at::Tensor numbers_;            // those of RuleStep, a row for each way: rates differ
  std::int64_t num_steps_ = 0;
};

}  // namespace moesh::optim
