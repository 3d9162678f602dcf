#pragma once
// What the train loop knows of an optimizer. Its state is sharded like the stored values and has
// their type; an update looks at one element at a time, so it neither knows the mesh nor depends on
// it.

#include <string>
#include <vector>

#include "moesh/optim/params.h"

namespace moesh::optim {

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Updates every stored value in place from its gradient, and sets the gradients to none. Either
  /// all parameters move or, with an error, none. A step that is skipped is zero_grad() alone.
  void step(double lr);
  /// Sets every gradient to none.
  void zero_grad() { params_.zero_grad(); }

  /// One tensor of the state, for a checkpoint: "layers.0.gate.weight.exp_avg", with the shape of
  /// param->shard. Writing into `value` (copy_) restores it.
  struct State {
    std::string name;
    const Stored* param;
    at::Tensor value;
  };
  std::vector<State> state() const;
  /// The number of steps taken, which belongs to the state: AdamW's bias correction depends on it.
  std::int64_t num_steps() const { return num_steps_; }
  void set_num_steps(std::int64_t n);

  const ParamList& params() const { return params_; }

 protected:
  /// A parameter in a step: `state` has a tensor per name that the constructor was given.
  struct Moving {
    at::Tensor value, gradient;
    std::vector<at::Tensor> state;
    Group group;
  };

  Optimizer(ParamList params, std::vector<std::string> state_names);
  /// Moves parameters in place, without autograd; none is empty. Called with the number of this
  /// step, from 1.
  virtual void update(const std::vector<Moving>& params, double lr, std::int64_t step) = 0;

 private:
  ParamList params_;
  std::vector<std::string> state_names_;
  std::vector<std::vector<at::Tensor>> state_;  // [parameter][name]
  std::int64_t num_steps_ = 0;
};

}  // namespace moesh::optim
