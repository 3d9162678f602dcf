#pragma once
// Runs steps one after the other, as a CUDA graph where possible: the host then makes one call for
// the thousands of launches of a step.

#include <c10/util/Exception.h>

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "moesh/kernels/graph.h"
#include "moesh/train/step.h"

namespace moesh::train {

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

  /// Like take_step. The first steps with batches of some sizes run without a graph, because they
  /// allocate state. Each bound on the documents has a graph of its own, and all graphs have one
  /// memory. If that is not enough, the graphs are freed and the step runs without one.
  /// `counts_float8`: the step counts codes of float8, and is a graph of its own.
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
