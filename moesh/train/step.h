#pragma once
// One optimizer step: the gradients of all micro-batches, their norm, the update, the expert bias.
// The host queues all of it on the device without waiting, and then reads the results once.

#include <c10/util/Exception.h>

#include <array>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "moesh/kernels/graph.h"
#include "moesh/models/model.h"
#include "moesh/nn/tokens.h"
#include "moesh/optim/optimizer.h"
#include "moesh/optim/params.h"
#include "moesh/train/pipeline.h"

namespace moesh::train {

struct StepOptions {
  double max_norm = 1;        // of the gradient; 0: not clipped
  double bias_coeff = 0.001;  // by how much the expert bias moves; 0: it stays
  double qk_clip = 0;         // largest logit of attention; 0: not clipped
  bool overlap = true;        // gradients are summed over the ranks while backward goes on
  PipelineOptions pipeline;
  models::ForwardOptions forward;
  std::int64_t float8_layers = 0;  // whose codes can be counted; 0: nothing is in float8
  bool counts_float8 = false;      // in this step
  bool probe_waits = true;  // forward.probe reads what the device has: no step is a CUDA graph
};

struct StepResult;

/// Float64 numbers on the device, one after the other, and what is done with each when the host
/// reads them.
struct UnreadNumbers {
  struct Part {
    std::int64_t count;
    std::function<void(StepResult& to, const at::Tensor& numbers)> put;
  };
  at::Tensor values;
  std::vector<Part> parts;
};

/// Results of a step on the device, not read yet.
struct UnreadStep {
  UnreadNumbers sums;             // of the forwards of all ranks; first those of FirstSums
  UnreadNumbers update;           // nothing before the update
  nn::CheckLater::Checks checks;  // of this rank
};

/// The results of the micro-batches of a step; every number is over all ranks.
struct Gradients {
  double loss = 0;              // cross-entropy per valid token
  double total_loss = 0;        // with the auxiliary losses
  std::int64_t num_tokens = 0;  // valid tokens of the step
  /// The parts of the auxiliary losses, each with its weight in it; 0 where that is 0.
  std::array<double, models::kNumAuxiliary> auxiliary{};
  std::vector<at::Tensor> counts_E;  // of each MoE layer, int64, on the host
  /// int64 [layers, experts and dense projections, 3, 3], on the host (fsdp/float8_counts.h);
  /// undefined: they were not counted.
  at::Tensor float8_counts;
  UnreadStep on_device;
};

/// The range of the expert bias of a layer.
struct BiasRange {
  double least = 0, largest = 0;
};

struct Update {
  double grad_norm = 0;
  std::vector<BiasRange> bias;      // of each MoE layer, after the step
  std::optional<double> max_logit;  // of attention, before it was clipped; with QK-clip
  /// A gradient was not finite, or there was no valid token: nothing has moved, on any rank.
  bool skipped = false;
};

struct StepResult {
  Gradients gradients;
  Update update;
};

// Work that the host queues on the device; on one rank none of these waits for it. In between, a
// CUDA graph may stand for the calls of one step.

/// Forward and backward of every micro-batch. The valid tokens of the step are counted over all
/// ranks before the first backward, so that every one of them has the same weight.
/// `num_step_tokens` of the batches is filled in here.
UnreadStep start_gradients(models::Model& model, std::vector<models::MicroBatch> batches,
                           const StepOptions& options);
/// Between Optimizer's begin_step and end_step: clips, updates the parameters and moves the expert
/// bias; or, where it must, skips all of it.
void start_update(models::Model& model, optim::Optimizer& optimizer, UnreadStep& step,
                  const StepOptions& options);
/// Waits, and reads all of it at once. A failed check of a token or a label throws here, on the
/// rank that found it.
StepResult read(const UnreadStep& step);

/// float64 zeros: the term of a rank that has nothing to add to a sum over tokens.
nn::TokenSum no_term(at::IntArrayRef sizes, const at::TensorOptions& options);

/// start_update and read, after begin_step and start_gradients: one wait, at the end of the step.
StepResult finish_step(models::Model& model, optim::Optimizer& optimizer, UnreadStep step,
                       const StepOptions& options);

/// A step in two parts, to look at the gradients in between; each waits.
Gradients accumulate_gradients(models::Model& model, std::vector<models::MicroBatch> batches,
                               const StepOptions& options);
Update apply_gradients(models::Model& model, optim::Optimizer& optimizer,
                       const Gradients& gradients, double lr, const StepOptions& options);

// Steps one after the other, as a CUDA graph where possible: the host then makes one call for the
// thousands of launches of a step.

/// Values by key, at most a fixed number; the one that was not used for the longest time is
/// dropped.
template <class Key, class Value>
class LruCache {
 public:
  explicit LruCache(std::size_t most) : most_(most) {}

  /// The value of the key; a new one if there is none. The dropped value is freed before the new
  /// one is made.
  Value& operator[](const Key& key) {
    auto it = all_.begin();
    while (it != all_.end() && it->first != key) ++it;
    if (it == all_.end()) {
      if (all_.size() == most_) all_.pop_back();
      all_.emplace_front(key, Value());
    } else {
      all_.splice(all_.begin(), all_, it);
    }
    return all_.front().second;
  }
  /// The one that was asked for last comes first.
  auto begin() { return all_.begin(); }
  auto end() { return all_.end(); }
  std::size_t size() const { return all_.size(); }
  void clear() { all_.clear(); }

 private:
  std::size_t most_;
  std::list<std::pair<Key, Value>> all_;
};

enum class UseGraph { automatic, on, off };

/// A graph holds the addresses of what a step reads and writes, so the stepper is the only one that
/// replaces a tensor of the model or of the optimizer: other code that writes them does so in
/// place.
class Stepper {
 public:
  /// `graph` on: if a step cannot be a graph, an Error (config) with the reason. Automatic: then it
  /// runs without one, and the log says why, once.
  Stepper(models::Model& model, optim::Optimizer& optimizer, StepOptions options,
          UseGraph graph = UseGraph::automatic, kernels::Graphs graphs = {});

  /// Gradients, their norm and the update. The first steps with batches of some sizes run without a
  /// graph, because they allocate state. Each bound on the documents has a graph of its own, and
  /// all graphs have one memory. If that is not enough, the graphs are freed and the step runs
  /// without one. `counts_float8`: the step counts codes of float8, and is a graph of its own.
  StepResult operator()(std::vector<models::MicroBatch> batches, double lr,
                        bool counts_float8 = false);

  /// Frees the graphs and their memory, if there are any: the next steps record new ones.
  bool release();
  /// Runs f() between steps. If there is not enough memory for f and the graphs, runs it again
  /// after `release`.
  template <class F>
  auto beside(const F& f) {
    try {
      return f();
    } catch (const c10::OutOfMemoryError&) {
      if (!release()) throw;
    }
    return f();
  }

  /// Steps that were replayed, and graphs that were recorded.
  std::int64_t num_replayed() const { return num_replayed_; }
  std::int64_t num_recorded() const { return num_recorded_; }

  static constexpr int kEagerSteps = 3;
  static constexpr std::size_t kMostGraphs = 8;

 private:
  using Batches = std::vector<models::MicroBatch>;
  using Shape = std::vector<std::int64_t>;
  struct Recorded {
    Batches inputs;
    UnreadStep step;
    std::unique_ptr<kernels::Graph> graph;
  };
  std::string refusal() const;
  void refuse(const std::string& reason);
  Recorded* recorded(const Batches& batches);
  void record(Recorded& r, const Batches& batches);
  StepResult replay(Recorded& r, Batches& batches, double lr);
  StepResult take_eagerly(const Batches& batches, double lr);

  models::Model& model_;
  optim::Optimizer& optimizer_;
  StepOptions options_;
  UseGraph graph_;
  kernels::Graphs graphs_;
  LruCache<Shape, int> num_eager_{kMostGraphs};      // by the sizes of the batches
  LruCache<Shape, Recorded> recorded_{kMostGraphs};  // by these, documents and counts_float8
  bool had_no_memory_ = false;
  std::int64_t num_replayed_ = 0, num_recorded_ = 0;
};

}  // namespace moesh::train
