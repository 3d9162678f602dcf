#pragma once
// Steps one after the other, as a CUDA graph where that can be: the host then makes one call for
// the thousands of launches of a step.

#include <c10/util/Exception.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "moesh/kernels/graph.h"
#include "moesh/train/step.h"

namespace moesh::train {

enum class UseGraph { automatic, on, off };

/// A graph holds the addresses of what a step reads and writes, so the stepper is the only one that
/// replaces a tensor of the model or of the optimizer: whoever else writes them does so in place.
class Stepper {
 public:
  /// `graph` on: an Error (config) with the reason where a step cannot be one; automatic: then it
  /// runs without, and the log says why, once.
  Stepper(models::Model& model, optim::Optimizer& optimizer, StepOptions options,
          UseGraph graph = UseGraph::automatic);

  /// As take_step. The first steps of a shape run without a graph, to make what is made once.
  StepResult operator()(std::vector<models::MicroBatch> batches, double lr);

  /// Gives the graphs and their memory back, if there are any: the next steps record new ones.
  bool release();
  /// f(), which runs beside the steps; once more after `release` where there was not enough memory
  /// for f and the graphs.
  template <class F>
  auto beside(const F& f) {
    try {
      return f();
    } catch (const c10::OutOfMemoryError&) {
      if (!release()) throw;
    }
    return f();
  }

  /// Steps that were replayed.
  std::int64_t num_replayed() const { return num_replayed_; }

  static constexpr int kEagerSteps = 3;

 private:
  struct Recorded {  // one for each shape of a step
    std::vector<models::MicroBatch> inputs;
    Unread step;
    std::unique_ptr<kernels::Graph> graph;
    int num_eager = 0;
  };
  std::string refusal() const;
  bool record(Recorded& r, const std::vector<models::MicroBatch>& batches);
  void refuse(const std::string& reason);

  models::Model& model_;
  optim::Optimizer& optimizer_;
  StepOptions options_;
  UseGraph graph_;
  std::map<std::vector<std::int64_t>, Recorded> recorded_;
  std::int64_t num_replayed_ = 0;
};

}  // namespace moesh::train
