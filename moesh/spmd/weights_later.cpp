#include "moesh/spmd/weights_later.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "moesh/base/error.h"
#include "moesh/spmd/attach.h"

namespace moesh {
namespace {

bool has_gradient(const at::Tensor& weight) { return weight.defined() && weight.requires_grad(); }

}  // namespace

void WeightHalf::run() {
  if (work_.empty()) return;
  const at::NoGradGuard no_grad;
  const WeightsLater::AtOnce at_once(num_at_once_);
  // Memory that each keeps is freed as soon as it is done.
  raw::run_backward([&] {
    for (auto& work : work_) {
      std::exchange(work, nullptr)();
      --*num_left_;
    }
  });
  work_.clear();
}

void WeightsLater::add(std::function<void()> f) {
  if (is_open())
    work_.push_back(std::move(f));
  else
    f();
}

WeightHalf WeightsLater::take() {
  WeightHalf half;
  half.num_at_once_ = num_at_once_, half.num_left_ = num_left_;
  half.work_ = std::exchange(work_, {});
  *num_left_ += static_cast<std::int64_t>(half.work_.size());
  return half;
}

void WeightsLater::finish() {
  const auto never_taken = static_cast<std::int64_t>(work_.size());
  MOESH_CHECK(*num_left_ == 0 && never_taken == 0, ErrorKind::internal, "the step has ended, and ",
              *num_left_ + never_taken,
              " gradients of weights were left for later and never computed; every backward of "
              "inputs needs its backward of weights");
}

namespace raw {

struct WeightSink::Edges {
  std::vector<torch::autograd::Edge> all;  // an invalid one for no weight
};

WeightSink::WeightSink(const std::vector<at::Tensor>& weights, std::shared_ptr<WeightsLater> later)
    : edges_(std::make_unique<Edges>()), later_(std::move(later)) {
  for (const auto& w : weights)
    edges_->all.push_back(has_gradient(w) ? torch::autograd::impl::gradient_edge(w)
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

void WeightSink::leave(std::function<void()> f) const {
  if (later_)
    later_->add(std::move(f));
  else
    f();
}

c10::intrusive_ptr<WeightSink> sink_for(const at::Tensor& x,
                                        const std::vector<at::Tensor>& weights) {
  std::shared_ptr<WeightsLater> later;
  if (at::GradMode::is_enabled() && x.requires_grad())
    for (const auto& w : weights)
      if (!later) later = later_of(w);
  return later ? c10::make_intrusive<WeightSink>(weights, later)
               : c10::make_intrusive<WeightSink>();
}

}  // namespace raw
}  // namespace moesh
