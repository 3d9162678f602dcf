#include "moesh/train/stepper.h"

#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/comm/mesh.h"

namespace moesh::train {
namespace {

std::vector<std::int64_t> shape_of(const std::vector<models::MicroBatch>& batches) {
  std::vector<std::int64_t> shape;
  for (const auto& b : batches)
    for (const auto n : {b.input_ids_BL.size(0), b.input_ids_BL.size(1), b.documents.most})
      shape.push_back(n);
  return shape;
}

}  // namespace

Stepper::Stepper(models::Model& model, optim::Optimizer& optimizer, StepOptions options,
                 UseGraph graph)
    : model_(model), optimizer_(optimizer), options_(std::move(options)), graph_(graph) {
  if (graph_ == UseGraph::off) return;
  const at::Device device = optimizer.params()[0].stored->value.device();
  if (graph_ == UseGraph::automatic && !device.is_cuda())
    graph_ = UseGraph::off;  // nobody has asked
  else if (const std::string reason = refusal(); !reason.empty())
    refuse(reason);
}

std::string Stepper::refusal() const {
  const at::Device device = optimizer_.params()[0].stored->value.device();
  if (std::string reason = kernels::refuses_graphs(device); !reason.empty()) return reason;
  if (current_mesh().shape().num_ranks() > 1) return "ranks meet on the host in a step";
  if (options_.forward.probe) return "somebody looks at the forward pass";
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

bool Stepper::record(Recorded& r, const std::vector<models::MicroBatch>& batches) {
  r.inputs = batches;
  for (auto& b : r.inputs)
    for (at::Tensor* t : b.from_data()) *t = t->clone();
  try {
    r.graph = std::make_unique<kernels::Graph>([&] {
      r.step = start_gradients(model_, r.inputs, options_);
      start_update(model_, optimizer_, r.step, options_);
      optimizer_.zero_grad();  // their memory is the graph's
    });
    return true;
  } catch (const c10::Error& e) {
    optimizer_.zero_grad();
    refuse(e.what_without_backtrace());
  } catch (const Error& e) {
    optimizer_.zero_grad();
    if (e.kind() == ErrorKind::config) throw;
    refuse(e.what());
  }
  return false;
}

bool Stepper::release() {
  bool any = false;
  for (auto& [shape, r] : recorded_) {
    if (!r.graph) continue;
    any = true;
    r = {.num_eager = kEagerSteps - 1};  // one more, to make again what was let go meanwhile
  }
  return any;
}

StepResult Stepper::operator()(std::vector<models::MicroBatch> batches, double lr) {
  if (graph_ == UseGraph::off)
    return take_step(model_, optimizer_, std::move(batches), lr, options_);
  Recorded& r = recorded_[shape_of(batches)];
  const bool is_ready = r.graph || (r.num_eager >= kEagerSteps && record(r, batches));
  if (!is_ready) {
    if (graph_ != UseGraph::off) ++r.num_eager;
    return take_step(model_, optimizer_, std::move(batches), lr, options_);
  }
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const auto held = r.inputs[i].from_data(), given = batches[i].from_data();
    for (std::size_t t = 0; t < held.size(); ++t) held[t]->copy_(*given[t]);
  }
  optimizer_.begin_step(lr);
  r.graph->replay();
  ++num_replayed_;
  StepResult result = read(r.step);
  optimizer_.end_step(result.update.skipped);
  return result;
}

}  // namespace moesh::train
