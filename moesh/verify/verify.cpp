#include "moesh/verify/verify.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <sstream>

#include "moesh/base/error.h"
#include "moesh/base/random.h"
#include "moesh/base/text.h"
#include "moesh/base/this_thread.h"
#include "moesh/comm/rank_status.h"
#include "moesh/config/options.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/nn/qk_clip.h"
#include "moesh/pipeline/schedule.h"
#include "moesh/train/checkpointer.h"
#include "moesh/train/routing.h"

namespace moesh::verify {

using namespace train;
namespace {

using enum Place;

// Data in which more documents end than there are, by global sample: a label that would cross the
// border does not count, so ranks have different numbers of labels.
class WithIgnored : public data::Dataset {
 public:
  explicit WithIgnored(const VerifyCase& c)
      : all_(open_dataset(c.config)),
        random_(static_cast<std::uint64_t>(c.config.data.seed), "verify labels"),
        fraction_(c.ignored) {}

  data::Sample get(std::int64_t index) const override {
    data::Sample sample = all_->get(index);
    std::int64_t document = 0, before = sample.documents.front();
    for (size_t i = 0; i < sample.documents.size(); ++i) {
      const auto token = static_cast<std::uint64_t>(index) * sample.documents.size() + i;
      const bool ends = sample.documents[i] != before || random_.uniform(token) < fraction_;
      before = sample.documents[i];
      document += ends;
      if (before != data::kPadding) sample.documents[i] = document;
    }
    return sample;
  }
  std::int64_t sequence_length() const override { return all_->sequence_length(); }
  std::int64_t vocab_size() const override { return all_->vocab_size(); }
  std::string describe() const override { return all_->describe(); }

 private:
  std::unique_ptr<data::Dataset> all_;
  Random random_;
  double fraction_;
};

// A record for each step.
Routing make_records(const VerifyCase& c, const models::Model& model) {
  const auto num_tokens = sample_order(c.config).num_per_step() * c.config.data.sequence_length;
  Routing routing;
  for (int step = 0; step < c.steps; ++step)
    routing.push_back(std::make_unique<RoutingRecord>(model.num_moe_layers(), num_tokens,
                                                      router_config(c.config).top_k));
  return routing;
}

// How far the steps move each parameter.
class Movements {
 public:
  explicit Movements(models::Model& model) : model_(model) {
    model_.each_param([&](Stored& w, bool) { initial_.push_back(w.value.detach().clone()); });
  }
  void report(const std::function<void(const RankTensor&)>& report) {
    size_t i = 0;
    model_.each_param([&](Stored& w, bool) {
      const at::Tensor before = initial_[i++];
      if (!w.spec.trained) {
        MOESH_CHECK(!w.value.grad().defined() && w.value.equal(before), ErrorKind::internal,
                    "parameter '", w.spec.name,
                    "' is frozen (training.freeze), and it has moved or "
                    "has a gradient");
        return;
      }
      RankTensor moved{movement_name(w.spec.name),
                       w.value.detach().to(at::kDouble) - before.to(at::kDouble),
                       [region = w.shard](const at::Tensor& t) { return slice(t, region); }};
      moved.movement = {.by_expert = contains(w.cutting, ep)};
      report(moved);
    });
  }

 private:
  models::Model& model_;
  std::vector<at::Tensor> initial_;
};

at::Tensor whole_tensor(const at::Tensor& t) { return t; }
at::Tensor scalar(double x) { return at::full({}, x, at::kDouble); }

void report_sums(const Gradients& g, std::int64_t step,
                 const std::function<void(const RankTensor&)>& report) {
  const std::string at = "step " + std::to_string(step) + " ";
  for (size_t i = 0; i < g.counts_E.size(); ++i)
    report({at + "counts of MoE layer " + std::to_string(i), g.counts_E[i], whole_tensor, true});
  report({at + "loss", scalar(g.loss), whole_tensor});
  report({at + "total loss", scalar(g.total_loss), whole_tensor});
}

void report_gradients(models::Model& model, std::int64_t step,
                      const std::function<void(const RankTensor&)>& report) {
  model.each_param([&](Stored& w, bool) {
    if (!w.spec.trained) return;
    report({gradient_name(w.spec.name, step), raw::gather(w, raw::gradient(w)),
            [region = w.compute](const at::Tensor& t) { return slice(t, region); }});
  });
}

void report_logits(models::Model& model, const Mesh& mesh, std::int64_t step,
                   const std::function<void(const RankTensor&)>& report) {
  for (nn::Attention* a : model.attentions()) {
    const at::Tensor largest_h = nn::largest_logits({a});
    const auto num = largest_h.size(0);
    report({largest_logits_name(*a, step), largest_h,
            [&](const at::Tensor& t) { return t.narrow(0, num * mesh.coordinate(tp), num); }});
  }
}

// The ends of the model, which are on the first and on the last stage.
void report_ends(const VerifyCase& c, const Mesh& mesh, const VerifyProbe& probe,
                 const std::function<void(const RankTensor&)>& report) {
  const data::SampleOrder order = sample_order(c.config);
  // [micro-batch, B, ..] of the step's sequences [S, ..].
  const auto of_dp = [&](const at::Tensor& t) {
    return t.unflatten(0, {order.num_micro, order.num_dp, order.batch})
        .select(1, mesh.coordinate(dp));
  };
  const auto origin = [&](const PositionRanges& positions) {
    return TokenOrigin{order.first(0, 0, mesh.coordinate(dp)), positions,
                       (order.num_dp - 1) * order.batch};
  };
  const nn::Tokens tokens(mesh, order.batch, c.config.data.sequence_length,
                          c.config.parallelism.sequence_parallel, sequence_cut(c.config));
  const Pieces vocab{models::facts(c.config.model.architecture).vocab_size, mesh.size(tp)};
  if (!probe.logits_BLV.empty())
    report({"logits", at::stack(probe.logits_BLV),
            [&](const at::Tensor& t) {
              return of_dp(tokens.my_span(t).narrow(2, vocab.start(mesh.coordinate(tp)),
                                                    vocab.length(mesh.coordinate(tp))));
            },
            false, origin(tokens.span_ranges())});
  // A frozen embedding has no gradient, and needs none of what it gives.
  if (!probe.inputs.empty() && probe.inputs[0].requires_grad()) {
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& x : probe.inputs) gradients.push_back(x.grad());
    report({gradient_name("input"), at::stack(gradients),
            [&](const at::Tensor& t) { return of_dp(tokens.mine(t)); }, false,
            origin(tokens.mine_ranges())});
  }
}

}  // namespace

config::Settings verify_defaults(std::int64_t steps) {
  const config::Origin origin{"verify's default", true};
  return {{"training.steps", std::max(steps, Config{}.training.steps), origin},
          {"data.sequence_length", std::int64_t{7}, origin},
          {"data.document_mask", std::string("true"), origin},
          {"moe.load_balance_coeff", 0.01, origin},
          {"moe.balance_loss_weight", 0.02, origin},
          {"moe.z_loss_weight", 0.001, origin}};
}

std::string why_cut_alike(const Config& config) {
  if (config.moe.balance_over == "micro_batch" && config.moe.balance_loss_weight > 0)
    return "moe.balance_over is micro_batch, and that loss depends on how a step is cut";
  if (config.moe.force_load_balance)
    return "moe.force_load_balance goes by the place of a token in its micro-batch";
  if (sample_order(config).num_per_step() == 1) return "a step has one sequence";
  return "";
}

namespace {
// The fewest micro-batches that are as large neither as those of the mesh nor as what one dp rank
// has of them: a mistake may take either for all there is. A step of few sequences may have only
// one number besides that of the mesh.
std::int64_t num_micro_of_one_rank(const Config& config) {
  const data::SampleOrder order = sample_order(config);
  if (!why_cut_alike(config).empty()) return order.num_micro;
  const auto all = models::divisors(order.num_per_step());
  const auto differs = [&](std::int64_t n) {
    return n != order.num_micro && n != order.num_micro * order.num_dp;
  };
  const auto found = std::ranges::find_if(all, differs);
  return found != all.end() ? *found : all.back();
}
}  // namespace

Config one_rank(const Config& config) {
  const config::Origin origin{"one rank"};
  config::Settings settings = config::mesh_settings({}, origin.text);
  const std::int64_t sequences = sample_order(config).num_per_step(),
                     num_micro = num_micro_of_one_rank(config);
  settings.push_back({"data.batch_size", sequences / num_micro, origin});
  settings.push_back({"training.gradient_accumulation_steps", num_micro, origin});
  settings.push_back({"parallelism.moe_dispatcher", std::string("local"), origin});
  settings.push_back({"activation_checkpoint.mode", std::string("none"), origin});
  return changed(config, settings);
}

std::unique_ptr<data::Dataset> open_data(const VerifyCase& c) {
  return std::make_unique<WithIgnored>(c);
}

void run_steps(const VerifyCase& c, const data::Dataset& data, comm::Group& world, Routing* record,
               Routing* replay, const std::function<void(const RankTensor&)>& report,
               const Nearby* nearby, std::int64_t first_replayed) {
  const Config& config = c.config;
  const Mesh mesh(world, mesh_shape(config));
  const MeshScope scope(mesh);
  const auto model = make_model(config);
  load_initial_weights(config, *model);
  if (nearby) nearby->move_weights(*model);
  if (record) *record = make_records(c, *model);
  const auto optimizer = make_optimizer(*model, config);
  StepOptions options = step_options(config);
  Movements movements(*model);
  VerifyProbe probe;
  options.forward.probe = &probe;
  for (std::int64_t step = 0; step < c.steps; ++step) {
    probe.begin_step();
    const auto given = read_routing(config, *model, step + 1);
    probe.record = record ? (*record)[static_cast<size_t>(step)].get() : nullptr;
    if (replay && step >= first_replayed)
      probe.replay_from((*replay)[static_cast<size_t>(step)].get());
    else
      probe.replay = given ? &*given : nullptr;
    const Gradients g = accumulate_gradients(
        *model, step_batches(config, data, mesh, step * sample_order(config).num_per_step()),
        options);
    report_sums(g, step, report);
    if (step == 0) report_ends(c, mesh, probe, report);
    report_gradients(*model, step, report);
    if (options.qk_clip > 0) report_logits(*model, mesh, step, report);
    if (nearby) nearby->move_gradients(*model, step);
    const Update update =
        apply_gradients(*model, *optimizer, g, learning_rates(config)(step), options);
    const std::string at = "step " + std::to_string(step) + " ";
    report({at + "gradient norm", scalar(update.grad_norm), whole_tensor});
    if (update.max_logit) report({at + "largest logit", scalar(*update.max_logit), whole_tensor});
    report({at + "skipped", scalar(update.skipped ? 1 : 0), whole_tensor, true});
  }
  const auto routers = model->routers();
  const auto numbers = model->router_numbers();
  for (size_t i = 0; i < routers.size(); ++i)
    report({"expert bias of MoE layer " + std::to_string(numbers[i]), routers[i]->expert_bias(),
            whole_tensor});
  model->each_param([&](Stored& w, bool) {
    report({w.spec.name, raw::gather(w, raw::numbers(w)),
            [region = w.compute](const at::Tensor& t) { return slice(t, region); }});
  });
  movements.report(report);
}

std::string VerifyReport::describe(const MeshShape& mesh) const {
  if (holds()) return mesh.describe() + ": holds";
  std::ostringstream os;
  os << mesh.describe() << ": ";
  if (!error.empty()) os << "threw: " << printable(error);
  size_t shown = 0;
  for (const auto& m : mismatches) {
    if (++shown > 6) {
      os << "\n  and " << mismatches.size() - 6 << " more";
      break;
    }
    os << "\n  " << m.describe(mesh);
  }
  return os.str();
}

void VerifyReport::add(const Findings& findings, const MeshShape& shape) {
  if (error.empty()) std::ranges::move(findings.mismatches(shape), std::back_inserter(mismatches));
  const auto [ratio, tensor] = findings.worst();
  worst_ratio = ratio, worst_tensor = tensor;
  for (const Mismatch& m : mismatches)
    if (m.ratio() > worst_ratio) worst_ratio = m.ratio(), worst_tensor = m.tensor;
}

void VerifyReport::add_flips(const RoutingRecord& routing) {
  num_flipped += routing.num_flipped;
  largest_margin = std::max<double>(largest_margin, routing.largest_margin);
}

namespace {

// Runs on one rank, with the routing of the first of them.
class OneRank {
 public:
  explicit OneRank(const VerifyCase& c)
      : case_{one_rank(c.config), c.steps, c.ignored}, data_(open_data(case_)) {}

  Routing routing;

  // A run with its noise, and what is bounded of those nearby: whole ones take much memory.
  std::vector<NamedTensors> run(const std::string& dtype, std::int64_t steps,
                                std::uint64_t num_nearby, double roundings = 1) {
    VerifyCase c = case_;
    c.steps = steps;
    c.config = changed(c.config, {{"training.dtype", dtype, {"one rank"}}});
    std::vector<NamedTensors> all{run(c, nullptr)};
    for (std::uint64_t i = 0; i < num_nearby; ++i) {
      const Nearby nearby(all.front(), noise_type(c.config), i, roundings);
      NamedTensors other = run(c, &nearby);
      note_nearby(all.front(), other);
      std::erase_if(other.tensors, [](const auto& t) { return !is_bounded(t.first); });
      all.push_back(std::move(other));
    }
    set_noise(all.front(), noise_type(c.config), roundings);
    return all;
  }

 private:
  NamedTensors run(const VerifyCase& c, const Nearby* nearby) {
    NamedTensors result;
    const bool is_first = routing.empty();
    run_steps(
        c, *data_, *world_, is_first ? &routing : nullptr, is_first ? nullptr : &routing,
        [&](const RankTensor& t) {
          const at::Tensor value = t.value.detach();
          result.tensors.emplace_back(t.name, (t.tokens ? value.flatten(0, 1) : value).clone());
        },
        nearby);
    // Ranks compare with these tensors on streams of their own.
    if (const at::Device d = result.tensors.back().second.device(); !d.is_cpu())
      c10::impl::VirtualGuardImpl(d.type()).synchronizeDevice(d.index());
    return result;
  }

  VerifyCase case_;
  std::unique_ptr<data::Dataset> data_;
  std::shared_ptr<comm::Group> world_ = comm::solo_group();
};

}  // namespace

VerifyReference run_reference(const VerifyCase& c, std::uint64_t num_nearby) {
  OneRank one(c);
  const std::string wide = "float64", &dtype = c.config.training.dtype;
  const auto runs = one.run(dtype, c.steps, num_nearby);
  VerifyReference result{runs.front()};
  set_movement_noise(result, one_rank(c.config), c.steps);
  AgainstFloat64 found;
  if (dtype != wide)
    found = against_float64(
        runs, noise_type(c.config),
        one.run(wide, 1, num_nearby, roundings_in_float64(noise_type(c.config))).front());
  leave_decided(result, found.decided);
  result.left_out = left_out(result, c.steps);
  result.left_out.against_float64 = found.num_that_may_be_anything;
  result.unexplained = std::move(found.unexplained);
  result.routing = std::move(one.routing);
  return result;
}

double largest_of_ranks(comm::Group& world, double mine, at::Device device) {
  const at::Tensor all =
      world.all_gather(at::full({1}, mine, at::TensorOptions(at::kDouble).device(device)),
                       std::vector<std::int64_t>(static_cast<size_t>(world.size()), 1));
  return all.max().item<double>();
}

VerifyReport verify(const VerifyCase& c, const VerifyReference& reference, NamedTensors* values) {
  MOESH_CHECK(!values || comm::num_launched_processes() == 0, ErrorKind::config,
              "the tensors of a mesh can be put together in one process only; run without mpirun "
              "or srun");
  if (values)
    for (const auto& [name, value] : reference.tensors)
      values->tensors.emplace_back(name, at::zeros_like(value));
  std::mutex of_all_ranks;
  VerifyReport report;
  report.left_out = reference.left_out;
  const MeshShape shape = mesh_shape(c.config);
  const auto data = open_data(c);
  Findings findings(shape.num_ranks(), reference);
  auto& routing = const_cast<VerifyReference&>(reference).routing;
  for (const auto& step : routing) step->forget_flips();
  // Scores of a step that is lost are noise in any dtype.
  const std::int64_t first_replayed = c.replays() ? 0 : first_lost(reference).value_or(c.steps);
  // Each process has its own reference, and CPUs may differ: all go by the worst of them.
  double mine = 0, unexplained = 0;
  for (const Mismatch& m : reference.unexplained) mine = std::max(mine, m.ratio());
  launch_for(report, c.config, [&](comm::Group& world) {
    run_steps(
        c, *data, world, nullptr, &routing,
        [&](const RankTensor& t) {
          interruption_point();
          findings.compare(t, world.rank());
          if (!values) return;
          const std::lock_guard lock(of_all_ranks);
          t.place((*values)[t.name]).copy_(t.value.detach());
        },
        nullptr, first_replayed);
    findings.exchange(world, device(c.config));
    const double largest = largest_of_ranks(world, mine, device(c.config));
    const std::lock_guard lock(of_all_ranks);
    unexplained = largest;
  });
  if (report.error.empty()) {
    report.mismatches = reference.unexplained;
    if (unexplained > mine)
      report.mismatches.push_back(
          {.tensor = "what one rank has in another process, against float64",
           .error = unexplained,
           .allowed = 1});
  }
  report.add(findings, shape);
  if (c.replays())
    for (const auto& step : routing) report.add_flips(*step);
  return report;
}

bool VerifyReport::is_in_doubt() const {
  return error.empty() && worst_ratio > 1 && worst_ratio < 2;
}

VerifyReport verify_closely(const VerifyCase& c, VerifyReference& reference, NamedTensors* values) {
  VerifyReport report = verify(c, reference, values);
  if (!report.is_in_doubt()) return report;
  if (!reference.closer)
    reference.closer = std::make_unique<VerifyReference>(run_reference(c, kNumNearbyInDoubt));
  if (values) *values = {};
  return verify(c, *reference.closer, values);
}

void launch_for(VerifyReport& report, const Config& config,
                const std::function<void(comm::Group& world)>& f) {
  const int num_ranks = mesh_shape(config).num_ranks();
  std::atomic<int> num_begun = 0;
  const auto* is_unwanted = Interruptible::current();
  try {
    comm::launch(
        num_ranks,
        [&](comm::Group& world) {
          const Interruptible scope(is_unwanted);
          ++num_begun;
          if (world.rank() == 0) report.is_first = true;
          f(world);
        },
        launch_options(config));
  } catch (const std::exception&) {
    const auto fault = std::current_exception();
    const int num_here = num_ranks / std::max(1, comm::num_launched_processes());
    const ErrorKind kind = comm::kind_of(fault);  // config, too, for lack of memory
    if (num_begun < num_here || kind == ErrorKind::config || kind == ErrorKind::data ||
        kind == ErrorKind::storage)
      throw;
    report.error = comm::text_of(fault);
  }
}

Config with_micro_batches(const Config& config, const std::string& origin) {
  constexpr const char* kKey = "training.gradient_accumulation_steps";
  const std::int64_t degree = config.parallelism.pipeline_parallel_degree;
  // Two at a time, and one more; through a pipeline, until all ranks have two.
  const std::int64_t wanted = config.parallelism.overlap_experts ? 2 * degree + 1
                              : degree > 1                       ? degree + 1
                                                                 : 1;
  if (wanted == 1 || config.training.global_batch_size != 0 || !config.origin(kKey).is_default)
    return config;
  return changed(config, {{kKey, wanted, {origin, true}}});
}

Config fitted(const Config& config, const SweepMesh& mesh) {
  const MeshShape& shape = mesh.shape;
  models::AnyConfig model = config.model.architecture;
  const auto fit = [](std::int64_t value, std::int64_t divisor) {
    return value % divisor == 0 ? value : divisor * std::max<std::int64_t>(1, value / divisor);
  };
  const int each = pipeline::stages_of_a_rank(mesh.schedule, pipeline::kStagesOfARank);
  const std::int64_t num_stages = shape.pp == 1 ? 1 : std::int64_t{shape.pp} * each;
  std::visit(
      [&](auto& m) {
        m.num_layers = std::max(m.num_layers, num_stages);
        m.tie_embeddings |= mesh.is_tied;
        m.num_heads = fit(m.num_heads, shape.tp);
        if constexpr (requires { m.num_kv_heads; }) {
          m.num_kv_heads = fit(m.num_kv_heads, shape.tp);
          m.num_heads = fit(m.num_heads, m.num_kv_heads);
        }
        if constexpr (requires { m.num_key_heads; }) {
          m.num_key_heads = fit(m.num_key_heads, shape.tp);
          m.num_value_heads = fit(m.num_value_heads, m.num_key_heads);
        }
        if (const auto tile = float8(config); tile.any()) {
          const std::int64_t t = config.training.float8_tile,
                             t_cut = t * std::lcm(shape.tp, shape.etp);
          m.dim = fit(m.dim, t), m.moe_ffn = fit(m.moe_ffn, t_cut);
          if constexpr (requires { m.ffn; }) m.ffn = fit(m.ffn, t_cut);
          if constexpr (requires { m.shared_ffn; }) m.shared_ffn = fit(m.shared_ffn, t_cut);
        }
        if constexpr (requires { m.num_groups; }) {
          m.num_experts = fit(m.num_experts, shape.ep);
          if (m.num_experts % m.num_groups != 0 || m.num_experts / m.num_groups < 2)
            m.num_groups = m.top_groups = 1;
          m.top_k = std::min(m.top_k, m.num_experts / m.num_groups * m.top_groups);
        } else {
          m.num_experts = fit(m.num_experts, shape.ep);
          m.top_k = std::min(m.top_k, m.num_experts);
        }
      },
      model);
  const config::Origin origin{"--sweep"};
  auto settings = config::mesh_settings(shape, origin.text);
  if (shape.pp > 1) {
    settings.push_back({"parallelism.pipeline_parallel_schedule", mesh.schedule, origin});
    if (!pipeline::can_be_joined(mesh.schedule))
      settings.push_back({"parallelism.overlap_experts", false, origin});
  }
  if (config.origin("parallelism.context_parallel_cut").is_default)
    settings.push_back({"parallelism.context_parallel_cut", mesh.cut, origin});
  if (shape.num_nodes_of_ep() > 1 && config.origin("parallelism.moe_dispatcher").is_default)
    settings.push_back({"parallelism.moe_dispatcher", std::string("two_hops"), origin});
  if (const auto global = config.training.global_batch_size; global > 0)
    settings.push_back({"training.global_batch_size",
                        fit(global, config.data.batch_size * shape.dp_replicate * shape.dp_shard),
                        origin});
  return with_micro_batches(changed(config, settings, config::RequestedModel{model, "--sweep"}),
                            origin.text);
}

}  // namespace moesh::verify
