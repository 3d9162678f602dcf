#include "moesh/train/step.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/base/timeline.h"
#include "moesh/comm/mesh.h"
#include "moesh/fsdp/step_state.h"
#include "moesh/nn/qk_clip.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/transitions.h"

namespace moesh::train {
namespace {

using enum Place;

// The first of the sums of a step, by which the update goes.
enum FirstSums : std::int64_t { kTokens, kCrossEntropy, kTotal, kFailed, kNumFirst };

double number_at(const at::Tensor& numbers, std::int64_t i) {
  return numbers.const_data_ptr<double>()[i];
}

// Every cp and tp rank has the labels of its dp rank whole.
at::Tensor count_valid(const std::vector<models::MicroBatch>& batches) {
  at::Tensor mine;
  for (const auto& b : batches) {
    const at::Tensor count = b.valid_BL().sum().to(at::kDouble);
    mine = mine.defined() ? mine + count : count;
  }
  return whole(all_reduce<dp, I>(assume<Dense{P, I, I}>(mine)));
}

// A term of each rank, so that all ranks skip a step in which one has found something.
nn::TokenSum num_failed(const nn::CheckLater::Checks& checks, const at::TensorOptions& options) {
  const nn::TokenSum sum = no_term({}, options);
  for (const auto& found : checks.found) at::Tensor(local(sum)).add_(found.select(0, 0));
  return sum;
}

nn::TokenSum codes_of(const StepFloat8Counts& counts) {
  const nn::TokenSum sum = no_term({counts.all().numel()}, counts.all().options());
  at::Tensor(local(sum)).add_(counts.all().flatten());
  return sum;
}

// The sums of the forwards of this rank, in float64, which holds every count. A rank of a
// pipeline has the terms of its stages: the last one the cross-entropy, each those of its own MoE
// layers, at their places among all.
struct StepSums {
  std::vector<nn::TokenSum> losses;  // cross-entropy, and with the auxiliary losses
  nn::TokenSum auxiliary;
  std::vector<nn::TokenSum> counts;  // of each MoE layer of the model
  bool has_auxiliary;

  StepSums(const models::Model& model, const StepOptions& options)
      : losses(2),
        counts(static_cast<size_t>(model.num_moe_layers())),
        has_auxiliary(options.forward.auxiliary.any() && model.num_moe_layers() > 0) {}

  void add(const models::ForwardResult& result) {
    add_to(losses[0], result.cross_entropy);
    add_to(losses[1], result.loss);
    add_to(auxiliary, result.auxiliary);
    for (size_t i = 0; i < result.counts_E.size(); ++i)
      add_to(counts[static_cast<size_t>(result.first_moe_layer) + i], result.counts_E[i]);
  }
  // All of them in one, with zeros where this rank has none; `parts` gets what they are for.
  nn::TokenSum joined(const models::Model& model, const nn::TokenSum& num_failed,
                      const StepFloat8Counts* float8, const at::TensorOptions& options,
                      std::vector<UnreadNumbers::Part>& parts) const {
    const auto or_none = [&](const nn::TokenSum& sum, at::IntArrayRef sizes) {
      return local(sum).defined() ? sum : no_term(sizes, options);
    };
    std::vector<nn::TokenSum> terms{
        stack(std::vector{or_none(losses[0], {}), or_none(losses[1], {}), num_failed})};
    parts.push_back({kNumFirst, [](StepResult& to, const at::Tensor& sums) {
                       Gradients& g = to.gradients;
                       g.num_tokens = static_cast<std::int64_t>(number_at(sums, kTokens));
                       g.loss = number_at(sums, kCrossEntropy);
                       g.total_loss = number_at(sums, kTotal);
                     }});
    const auto add = [&](const nn::TokenSum& term, auto put) {
      terms.push_back(term);
      parts.push_back({local(term).numel(), put});
    };
    if (has_auxiliary)
      add(or_none(auxiliary, {models::kNumAuxiliary}), [](StepResult& to, const at::Tensor& sums) {
        std::copy_n(sums.const_data_ptr<double>(), models::kNumAuxiliary,
                    to.gradients.auxiliary.begin());
      });
    for (const auto& count : counts)
      add(or_none(count, {model.num_experts()}), [](StepResult& to, const at::Tensor& sums) {
        to.gradients.counts_E.push_back(sums.to(at::kLong));
      });
    if (float8)
      add(codes_of(*float8),
          [sizes = float8->all().sizes().vec()](StepResult& to, const at::Tensor& sums) {
            to.gradients.float8_counts = sums.to(at::kLong).view(sizes);
          });
    return cat(terms, 0);
  }

 private:
  static void add_to(nn::TokenSum& sum, const nn::TokenSum& term) {
    if (!local(term).defined()) return;
    const nn::TokenSum wide = cast(detach(term), at::kDouble);
    sum = local(sum).defined() ? sum + wide : wide;
  }
};

// The least and the largest expert bias of each MoE layer of the model, in turn.
at::Tensor bias_ranges(models::Model& model, const at::TensorOptions& options) {
  std::vector<at::Tensor> numbers(static_cast<size_t>(2 * model.num_moe_layers()),
                                  at::zeros({}, options.dtype(at::kDouble)));
  if (numbers.empty()) return at::zeros({0}, options.dtype(at::kDouble));
  const auto routers = model.routers();
  const auto places = model.router_numbers();
  for (size_t i = 0; i < routers.size(); ++i) {
    const auto [least, largest] = routers[i]->expert_bias().aminmax();
    numbers[static_cast<size_t>(2 * places[i])] = least.to(at::kDouble);
    numbers[static_cast<size_t>(2 * places[i] + 1)] = largest.to(at::kDouble);
  }
  return whole(sum_over_stages(constant(at::stack(numbers))));
}

}  // namespace

nn::TokenSum no_term(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return assume<Dense{P, P, P}>(at::zeros(sizes, options.dtype(at::kDouble)));
}

UnreadStep start_gradients(models::Model& model, std::vector<models::MicroBatch> batches,
                           const StepOptions& options) {
  MOESH_CHECK(!batches.empty(), ErrorKind::config,
              "a step of no micro-batch; gradient_accumulation_steps is 1 or more");
  const kernels::UseGpuKernels chosen(model.gpu_kernels());
  const nn::CheckLater later;
  StepState state(options.overlap);
  const at::Tensor num_tokens = count_valid(batches);
  const std::int64_t float8_layers = options.counts_float8 ? options.float8_layers : 0;
  if (float8_layers > 0)
    state.float8_counts = std::make_shared<StepFloat8Counts>(float8_layers, num_tokens.device());
  for (auto& batch : batches) {
    batch.num_step_tokens = num_tokens.clamp_min(1);
    batch.index = &batch - batches.data();
  }
  const auto schedule = schedule_of(options.pipeline, batches.size());
  StepSums sums(model, options);
  run_pipeline(
      model, batches, options.forward, schedule, &state,
      [&](const pipeline::Action&, const models::ForwardResult& result) { sums.add(result); },
      options.pipeline.overlap_experts);
  {
    const InSection section(Section::reduce);
    state.finish_sums();
    add_tied_gradients(model, schedule);
  }
  UnreadStep step{.sums = {}, .update = {}, .checks = later.checks()};
  // One message for all of it, and one more over the stages.
  const nn::TokenSum mine =
      sums.joined(model, num_failed(step.checks, num_tokens.options()), state.float8_counts.get(),
                  num_tokens.options(), step.sums.parts);
  step.sums.values =
      at::cat({num_tokens.reshape({1}), whole(sum_over_stages(all_reduce<kTokenAxes>(mine)))});
  return step;
}

void start_update(models::Model& model, optim::Optimizer& optimizer, UnreadStep& step,
                  const StepOptions& options) {
  RECORD_USER_SCOPE("norm and update");
  const InSection section(Section::update);
  const kernels::UseGpuKernels chosen(model.gpu_kernels());
  const auto norm = optim::grad_norm(optimizer.params());
  const auto sum = [&](std::int64_t i) { return step.sums.values.select(0, i); };
  const at::Tensor is_good = whole(norm)
                                 .isfinite()
                                 .logical_and(sum(kTotal).isfinite())
                                 .logical_and(sum(kTokens).gt(0))
                                 .logical_and(sum(kFailed).eq(0));
  const at::Tensor skip = is_good.logical_not().to(at::kDouble);
  optimizer.update(options.max_norm > 0 ? clip_factor(norm, options.max_norm) : at::ones_like(skip),
                   skip);
  std::vector<at::Tensor> numbers;
  step.update.parts.clear();
  const auto add = [&](const at::Tensor& number, auto put) {
    numbers.push_back(number.reshape({-1}));
    step.update.parts.push_back(
        {number.numel(), [put](StepResult& to, const at::Tensor& read) { put(to.update, read); }});
  };
  add(whole(norm), [](Update& to, const at::Tensor& read) { to.grad_norm = number_at(read, 0); });
  add(skip, [](Update& to, const at::Tensor& read) { to.skipped = number_at(read, 0) != 0; });
  if (options.qk_clip > 0)
    add(nn::clip_logits(model.attentions(), options.qk_clip, skip).to(at::kDouble),
        [](Update& to, const at::Tensor& read) { to.max_logit = number_at(read, 0); });
  for (auto* router : model.routers()) {
    if (options.bias_coeff != 0)
      router->update_bias(options.bias_coeff, skip);
    else
      router->clear_counts();
  }
  add(bias_ranges(model, skip.options()), [](Update& to, const at::Tensor& read) {
    for (std::int64_t i = 0; i < read.numel(); i += 2)
      to.bias.push_back({.least = number_at(read, i), .largest = number_at(read, i + 1)});
  });
  step.update.values = at::cat(numbers);
}

StepResult read(const UnreadStep& step) {
  // Bits, since the checks have whole numbers of 64.
  std::vector<at::Tensor> all;
  for (const UnreadNumbers* numbers : {&step.sums, &step.update})
    if (numbers->values.defined()) all.push_back(numbers->values.view(at::kLong));
  all.insert(all.end(), step.checks.found.begin(), step.checks.found.end());
  at::Tensor rest = [&] {
    const InSection section(Section::waiting);
    return at::cat(all).cpu();
  }();
  StepResult result;
  result.gradients.on_device = step;
  for (const UnreadNumbers* numbers : {&step.sums, &step.update})
    for (const auto& [count, put] : numbers->parts) {
      put(result, rest.narrow(0, 0, count).view(at::kDouble));
      rest = rest.narrow(0, count, rest.size(0) - count);
    }
  step.checks.raise(rest.const_data_ptr<std::int64_t>());
  return result;
}

StepResult finish_step(models::Model& model, optim::Optimizer& optimizer, UnreadStep step,
                       const StepOptions& options) {
  start_update(model, optimizer, step, options);
  try {
    const StepResult result = read(step);
    optimizer.end_step(result.update.skipped);
    return result;
  } catch (...) {
    optimizer.zero_grad();  // another batch begins from nothing
    throw;
  }
}

Gradients accumulate_gradients(models::Model& model, std::vector<models::MicroBatch> batches,
                               const StepOptions& options) {
  return read(start_gradients(model, std::move(batches), options)).gradients;
}

Update apply_gradients(models::Model& model, optim::Optimizer& optimizer,
                       const Gradients& gradients, double lr, const StepOptions& options) {
  optimizer.begin_step(lr);
  UnreadStep step = gradients.on_device;
  start_update(model, optimizer, step, options);
  const Update update = read(step).update;
  optimizer.end_step(update.skipped);
  return update;
}

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
