#include "moesh/train/stepper.h"

#include <algorithm>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/comm/mesh.h"

namespace moesh::train {
namespace {

std::vector<std::int64_t> sizes_of(const std::vector<models::MicroBatch>& batches) {
  std::vector<std::int64_t> sizes;
  for (const auto& b : batches)
    for (const auto n : b.input_ids_BL.sizes()) sizes.push_back(n);
  return sizes;
}

}  // namespace

Stepper::Stepper(models::Model& model, optim::Optimizer& optimizer, StepOptions options,
                 UseGraph graph, kernels::Graphs graphs)
    : model_(model),
      optimizer_(optimizer),
      options_(std::move(options)),
      graph_(graph),
      graphs_(std::move(graphs)) {
  if (graph_ == UseGraph::off) return;
  const std::string reason = refusal();
  if (reason.empty()) return;
  const at::Device device = optimizer.params()[0].stored->value.device();
  if (graph_ == UseGraph::automatic && !device.is_cuda())
    graph_ = UseGraph::off;  // not set by the user
  else
    refuse(reason);
}

std::string Stepper::refusal() const {
  const at::Device device = optimizer_.params()[0].stored->value.device();
  if (std::string reason = graphs_.refuses(device); !reason.empty()) return reason;
  if (current_mesh().shape().num_ranks() > 1) return "ranks meet on the host in a step";
  if (options_.forward.probe && options_.probe_waits) return "somebody looks at the forward pass";
  return "";
}

void Stepper::refuse(const std::string& reason) {
  MOESH_CHECK(graph_ != UseGraph::on, ErrorKind::config,
              "kernels.graph is on, but a step cannot be a CUDA graph: ", reason,
              "; use auto or off");
  graph_ = UseGraph::off;
  recorded_.clear();
  log_info("steps run without a CUDA graph: ", reason);
}

void Stepper::record(Recorded& r, const Batches& batches) {
  r.inputs = batches;
  for (auto& b : r.inputs)
    for (at::Tensor* t : b.from_data()) *t = t->clone();
  // The graph makes codes itself: its update does not.
  model_.each_param([](Stored& w, bool) { raw::forget_codes(w); });
  const kernels::Graph* beside = nullptr;
  for (const auto& [shape, other] : recorded_)
    if (other.graph) beside = other.graph.get();
  r.graph = graphs_.record(
      [&] {
        r.step = start_gradients(model_, r.inputs, options_);
        start_update(model_, optimizer_, r.step, options_);
        optimizer_.zero_grad();  // their memory is the graphs'
      },
      beside);
  ++num_recorded_;
}

// Null where this step runs without a graph.
Stepper::Recorded* Stepper::recorded(const Batches& batches) {
  Shape shape = sizes_of(batches);
  int& num_eager = num_eager_[shape];
  if (num_eager < kEagerSteps) {
    ++num_eager;
    return nullptr;
  }
  for (const auto& b : batches) shape.push_back(b.documents.most);
  shape.push_back(options_.counts_float8);
  std::string reason;
  try {
    Recorded& r = recorded_[shape];
    if (!r.graph) record(r, batches);
    return &r;
  } catch (const c10::OutOfMemoryError& e) {
    // With the memory of the other graphs it may do; where it does not, or they come in turn, no
    // more time is spent on it.
    if (std::exchange(had_no_memory_, true))
      reason = e.what_without_backtrace();
    else
      log_info("the CUDA graphs of steps are freed, as there is not enough memory for another");
  } catch (const c10::Error& e) {
    reason = e.what_without_backtrace();
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::config) throw;
    reason = e.what();
  }
  optimizer_.zero_grad();
  // The recorded work has not run: a copy that it would have written is still the old one.
  model_.each_param([](Stored& w, bool) {
    if (w.copy) w.copy->version = -1;
    raw::forget_codes(w);
  });
  if (reason.empty())
    release();
  else
    refuse(reason);
  return nullptr;
}

bool Stepper::release() {
  for (auto& [sizes, num_eager] : num_eager_)
    num_eager = std::min(num_eager, kEagerSteps - 1);  // to make again what was let go meanwhile
  const bool any = recorded_.size() > 0;
  recorded_.clear();
  return any;
}

StepResult Stepper::replay(Recorded& r, Batches& batches, double lr) {
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const auto held = r.inputs[i].from_data(), given = batches[i].from_data();
    for (std::size_t t = 0; t < held.size(); ++t) held[t]->copy_(*given[t]);
  }
  // The graph reads copies without a look at their versions.
  model_.each_param([](Stored& w, bool) { raw::current_copy(w); });
  optimizer_.begin_step(lr);
  r.graph->replay();
  optimizer_.note_replayed();
  ++num_replayed_;
  StepResult result = read(r.step);
  optimizer_.end_step(result.update.skipped);
  return result;
}

// Nothing has moved before all gradients are there: until then it can begin again.
StepResult Stepper::take_eagerly(const Batches& batches, double lr) {
  optimizer_.begin_step(lr);
  bool is_again = false;
  UnreadStep step = beside([&] {
    if (std::exchange(is_again, true)) {
      optimizer_.zero_grad();
      for (auto* router : model_.routers()) router->clear_counts();
    }
    return start_gradients(model_, batches, options_);
  });
  return finish_step(model_, optimizer_, std::move(step), options_);
}

StepResult Stepper::operator()(std::vector<models::MicroBatch> batches, double lr,
                               bool counts_float8) {
  options_.counts_float8 = counts_float8 && options_.float8_layers > 0;
  if (graph_ != UseGraph::off)
    if (Recorded* r = recorded(batches)) return replay(*r, batches, lr);
  return take_eagerly(batches, lr);
}

}  // namespace moesh::train
