#include "moesh/fsdp/recompute.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>

#include <deque>
#include <memory>
#include <string>

#include "moesh/base/error.h"
#include "moesh/fsdp/step_state.h"
#include "moesh/spmd/ops.h"

namespace moesh::raw {

// Values that the parts of f kept, in the order in which f reached them.
struct Results {
  explicit Results(Keep keep) : keeps(keep == Keep::expensive) {}

  struct KeptResult {
    std::string what;
    std::vector<at::Tensor> tensors;
  };
  std::deque<KeptResult> all;
  std::deque<std::any> once;  // what was computed_once
  at::Tensor coming;          // in the second run, the gradient of the first result
  bool keeps, is_second_run = false;
  bool has_first = false;  // the first result is defined
};

namespace {

// Parts of f keep and recall here, in the step or, outside of one, in a state of its own.
class ResultsScope {
 public:
  explicit ResultsScope(Results* results) {
    if (!StepState::current()) own_.emplace();
    outer_ = std::exchange(StepState::current()->results, results);
  }
  ~ResultsScope() { StepState::current()->results = outer_; }
  ResultsScope(const ResultsScope&) = delete;
  ResultsScope& operator=(const ResultsScope&) = delete;

 private:
  std::optional<StepState> own_;
  Results* outer_;
};

// The results of the current run; null: no recompute goes on.
Results* current_results() {
  const StepState* step = StepState::current();
  return step ? step->results : nullptr;
}

}  // namespace

std::optional<std::vector<at::Tensor>> recall(std::string_view what) {
  Results* const results = current_results();
  if (!results || !results->keeps || !results->is_second_run) return std::nullopt;
  MOESH_CHECK(!results->all.empty() && results->all.front().what == what, ErrorKind::internal,
              "the second run of a recompute asks for ", what, ", and the first one kept ",
              results->all.empty() ? "nothing more" : results->all.front().what,
              " here; f must do the same in both, and backward runs once");
  auto tensors = std::move(results->all.front().tensors);
  results->all.pop_front();
  return tensors;
}

void keep(std::string_view what, const std::vector<at::Tensor>& tensors) {
  Results* const results = current_results();
  if (!results || !results->keeps || results->is_second_run) return;
  auto& kept = results->all.emplace_back();
  kept.what = what;
  for (const auto& t : tensors) kept.tensors.push_back(t.defined() ? t.detach() : t);
}

bool is_second_run() {
  const Results* const results = current_results();
  return results && results->is_second_run;
}

at::Tensor coming_gradient() {
  const Results* const results = current_results();
  return results ? results->coming : at::Tensor();
}

std::any computed_once(const std::function<std::any()>& f) {
  Results* const results = current_results();
  if (!results) return f();
  if (!results->is_second_run) return results->once.emplace_back(f());
  MOESH_CHECK(!results->once.empty(), ErrorKind::internal,
              "the second run of a recompute computes more of what is computed once");
  std::any first = std::move(results->once.front());
  results->once.pop_front();
  return first;
}

at::Tensor kept_linear(const at::Tensor& x, const at::Tensor& w, const OwnProducts& own) {
  if (const auto first = recall("a linear layer")) return known_linear(x, w, {}, (*first)[0], own);
  const at::Tensor y = raw::linear(x, w, {}, own);
  keep("a linear layer", {y});
  return y;
}

std::vector<at::Tensor> recompute(
    std::function<std::vector<at::Tensor>(const at::Tensor& x, bool again)> f, const at::Tensor& x,
    Keep keep) {
  if (!at::GradMode::is_enabled()) return f(x, false);
  const auto kept = std::make_shared<Results>(keep);
  const auto backward = [f, kept](const Tensors& saved, const Tensors& grads) {
    const at::Tensor input = saved[0].detach().requires_grad_(true);
    Tensors outputs, gradients;
    {
      RECORD_USER_SCOPE("forward again");
      const at::AutoGradMode enable(true);
      const ResultsScope scope(kept.get());
      kept->is_second_run = true;
      if (kept->has_first) kept->coming = grads[0].contiguous();
      size_t next = 0;
      for (const auto& t : f(input, true)) {
        if (!t.defined()) continue;
        const auto& g = grads[next++];
        if (t.requires_grad()) outputs.push_back(t), gradients.push_back(g);
      }
    }
    kept->coming.reset();
    MOESH_CHECK(kept->all.empty(), ErrorKind::internal,
                "the second run of a recompute has not asked for ", kept->all.front().what,
                ", which the first one kept; f must do the same in both");
    torch::autograd::backward(outputs, gradients);
    return Tensors{input.grad()};
  };
  Tensors results;  // undefined ones have no place in the graph
  const auto forward = [&]() -> Differentiable {
    const ResultsScope scope(kept.get());
    results = f(x.detach(), false);
    Tensors defined;
    for (const auto& t : results)
      if (t.defined()) defined.push_back(t);
    kept->has_first = results[0].defined();
    return {defined, {x}, backward};
  };
  // The second input requires a gradient even where x does not, since the parameters inside do.
  const at::Tensor anchor = at::zeros({0}, x.options()).requires_grad_(true);
  const Tensors out = differentiable({x, anchor}, forward);
  size_t next = 0;
  for (auto& t : results)
    if (t.defined()) t = out[next++];
  return results;
}

}  // namespace moesh::raw
