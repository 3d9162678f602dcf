#include "moesh/spmd/weights_later.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "moesh/base/error.h"
#include "moesh/spmd/attach.h"

namespace moesh {
namespace {

thread_local std::vector<std::function<void()>>* current_work = nullptr;

}  // namespace

void WeightHalf::run() {
  const WeightsNow here;
  const at::NoGradGuard no_grad;
  // What each keeps is freed as soon as it is done.
  raw::run_backward([&] {
    for (auto& work : work_) {
      std::exchange(work, nullptr)();
      --*num_left_;
    }
  });
  work_.clear();
}

WeightsLater::WeightsLater(bool on) : outer_(current_work) {
  if (on) work_ = std::make_unique<Work>();
  current_work = work_.get();
}
WeightsLater::~WeightsLater() { current_work = outer_; }

WeightHalf WeightsLater::take() {
  WeightHalf half;
  half.num_left_ = num_left_;
  if (work_) half.work_ = std::exchange(*work_, {});
  *num_left_ += static_cast<std::int64_t>(half.work_.size());
  return half;
}

void WeightsLater::finish() {
  const std::int64_t never_taken = work_ ? static_cast<std::int64_t>(work_->size()) : 0;
  MOESH_CHECK(*num_left_ == 0 && never_taken == 0, ErrorKind::internal, "the step has ended, and ",
              *num_left_ + never_taken,
              " gradients of weights were left for later and never computed; every backward of "
              "inputs needs its backward of weights");
}

WeightsNow::WeightsNow() : outer_(std::exchange(current_work, nullptr)) {}
WeightsNow::~WeightsNow() { current_work = outer_; }

namespace raw {

bool are_weights_later() { return current_work != nullptr; }

void later(std::function<void()> f) {
  if (current_work)
    current_work->push_back(std::move(f));
  else
    f();
}

struct WeightSink::Edges {
  std::vector<torch::autograd::Edge> all;  // an invalid one for no weight
};

WeightSink::WeightSink(const std::vector<at::Tensor>& weights) : edges_(std::make_unique<Edges>()) {
  for (const auto& w : weights)
    edges_->all.push_back(w.defined() ? torch::autograd::impl::gradient_edge(w)
                                      : torch::autograd::Edge());
}
WeightSink::~WeightSink() = default;

bool WeightSink::is_empty() const { return edges_->all.empty(); }

void WeightSink::give(const std::vector<at::Tensor>& gradients) const {
  torch::autograd::edge_list roots;
  torch::autograd::variable_list values;
  for (std::size_t i = 0; i < edges_->all.size(); ++i) {
    if (!edges_->all[i].is_valid() || !gradients[i].defined()) continue;
    roots.push_back(edges_->all[i]);
    values.push_back(gradients[i]);
  }
  torch::autograd::Engine::get_default_engine().execute(roots, values, /*keep_graph=*/false,
                                                        /*create_graph=*/false,
                                                        /*accumulate_grad=*/true);
}

c10::intrusive_ptr<WeightSink> sink_for(const at::Tensor& x,
                                        const std::vector<at::Tensor>& weights) {
  bool is_later = are_weights_later() && at::GradMode::is_enabled() && x.requires_grad();
  for (const auto& w : weights) is_later = is_later && (!w.defined() || w.requires_grad());
  return c10::make_intrusive<WeightSink>(is_later ? weights : std::vector<at::Tensor>());
}

}  // namespace raw
}  // namespace moesh
