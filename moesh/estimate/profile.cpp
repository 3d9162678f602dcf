#include "moesh/estimate/profile.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "moesh/base/error.h"
#include "moesh/config/merge.h"
#include "moesh/estimate/dry_rank.h"
#include "moesh/models/stage.h"
#include "moesh/optim/rules.h"
#include "moesh/pipeline/simulate.h"

namespace moesh::estimate {
namespace {

// Layers of the shortest model to which both kinds are added.
constexpr int kShortest = 6;
const std::pair kSumOverTp(std::string("tp"), comm::Collective::all_reduce);

// The first layers of a model, by whether each is a mixture.
struct Short {
  models::AnyConfig architecture;
  std::vector<bool> is_moe;
};

// Whether short models have so many dense layers first. Others name the layers of each kind: they
// do where their own rule adds only one kind to a short model.
template <class Config>
bool begins_with_dense(const Config& c) {
  if constexpr (requires { c.num_dense_layers; }) return true;
  if constexpr (requires { c.mlp_only_layers; } || requires { c.moe_layers; })
    return c.plan().is_moe(kShortest) == c.plan().is_moe(kShortest + 1);
  return false;
}

template <class Config>
void set_dense(Config& c, std::int64_t num_dense) {
  std::vector<std::int64_t> layers(static_cast<size_t>(c.num_layers));
  std::iota(layers.begin(), layers.end(), 0);
  const auto first_moe = layers.begin() + std::min(num_dense, c.num_layers);
  if constexpr (requires { c.num_dense_layers; })
    c.num_dense_layers = num_dense;
  else if constexpr (requires { c.mlp_only_layers; })
    c.sparse_step = 1, c.mlp_only_layers = {layers.begin(), first_moe};
  else if constexpr (requires { c.moe_layers; })
    c.moe_layers = {first_moe, layers.end()};
}

Short shortened(const models::AnyConfig& full, int num_layers, int num_dense) {
  Short s{full, {}};
  std::visit(
      [&](auto& c) {
        const bool dense_first = begins_with_dense(c);
        c.num_layers = num_layers;
        if (dense_first) set_dense(c, num_dense);
        for (int i = 0; i < num_layers; ++i) s.is_moe.push_back(c.plan().is_moe(i));
      },
      s.architecture);
  return s;
}

bool begins_with_dense(const models::AnyConfig& full) {
  return std::visit([](const auto& c) { return begins_with_dense(c); }, full);
}

// After how many layers a model begins anew: where some see all keys and others a window, or have a
// state, one of each stands for neither, and they are added together.
int period(const ModelShape& shape) {
  const auto& flops = shape.flops.layers;
  const auto is_near = [](double a, double b) { return std::abs(a - b) <= 1e-9 * b; };
  std::size_t p = 1;
  while (p < flops.size() && !std::equal(flops.begin() + static_cast<std::ptrdiff_t>(p),
                                         flops.end(), flops.begin(), is_near))
    ++p;
  return static_cast<int>(p);
}

// Models of which some differ by one layer, or one period: each kind of layer is added to a model
// that has four of its kind already, so that the peak grows by what is held and not by what comes
// and goes (blocks gather their parameters while their neighbours work, and the sums of two travel
// meanwhile).
std::vector<Short> short_models(const models::AnyConfig& full, const ModelShape& shape) {
  const auto num = static_cast<int>(shape.is_moe.size());
  int num_dense = 0;
  for (const bool is_moe : shape.is_moe) num_dense += !is_moe;
  std::vector<Short> all;
  if (begins_with_dense(full) && num_dense > 0) {
    for (const auto& [layers, dense] : {std::pair{4, 4}, {5, 5}, {5, 1}, {6, 1}})
      all.push_back(shortened(full, layers, dense));
  } else {
    const bool is_uniform = num_dense == 0 || num_dense == num;
    const int step = is_uniform ? period(shape) : 1,
              first = is_uniform ? (3 / step + 1) * step : kShortest;
    for (int k = first; k <= first + (is_uniform ? 1 : 2) * step; k += step)
      all.push_back(shortened(full, k, 0));
  }
  return all;
}

// Calls f with the places of a model and of the next longer one, which has some layers of one kind
// more, and their number.
template <class F>
void each_longer(const std::vector<Short>& models, F f) {
  for (size_t a = 0; a < models.size(); ++a)
    for (size_t b = a + 1; b < models.size(); ++b) {
      const auto &shorter = models[a].is_moe, &longer = models[b].is_moe;
      if (longer.size() <= shorter.size()) continue;
      const auto more = longer.size() - shorter.size();
      std::vector<bool> extended = shorter;
      extended.insert(extended.end(), more, longer.back());
      if (extended == longer && b == a + 1) f(a, b, static_cast<std::int64_t>(more));
    }
}

void add(kernels::meta::WorkLedger& to, const kernels::meta::WorkLedger& other, double times) {
  for (const auto& [kernel, count] : other)
    if ((to[kernel] += times * count) == 0) to.erase(kernel);
}
// The first and so many times the other.
PartProfile plus(PartProfile p, const PartProfile& other, double times) {
  p.dense = p.dense.plus(other.dense, times), p.experts = p.experts.plus(other.experts, times);
  p.activations += times * other.activations, p.tp_gradients += times * other.tp_gradients;
  estimate::add(p.traffic, other.traffic, times);
  estimate::add(p.work.sent_in_forward, other.work.sent_in_forward, times);
  for (auto ledger : {&PassWork::forward, &PassWork::again, &PassWork::backward})
    add(p.work.*ledger, other.work.*ledger, times);
  return p;
}

// What a ring over n ranks sends of what it moves.
double sent(int n) { return static_cast<double>(n - 1) / n; }

PartProfile part(const Estimate& e) {
  PartProfile p{.dense = e.state.plus(e.expert_state, -1),
                .experts = e.expert_state,
                .activations = static_cast<double>(e.activations()),
                .traffic = e.traffic,
                .tp_gradients = static_cast<double>(e.tp_gradients),
                .work = e.work};
  if (e.mesh.tp > 1)
    p.traffic[kSumOverTp].num_bytes -=
        static_cast<std::int64_t>(2 * sent(e.mesh.tp) * p.tp_gradients);
  return p;
}

// From the mesh of the dry run to one with other sizes of dp: shards are smaller or larger, and so
// are the rings. Copies of the model sum their gradients.
PartProfile rescaled(const PartProfile& p, const MeshShape& from, const MeshShape& to) {
  PartProfile out{.activations = p.activations, .work = p.work};
  const auto factor = [&](Axes axes) {
    return static_cast<double>(from.size(axes)) / to.size(axes);
  };
  out.dense = out.dense.plus(p.dense, factor(fsdp));
  out.experts = out.experts.plus(p.experts, factor(efsdp));
  for (const auto& [key, entry] : p.traffic) {
    if (entry.num_calls == 0) continue;
    const Axes axes = axes_of(key.first);
    const double factor =
        to.size(axes) == from.size(axes) ? 1 : sent(to.size(axes)) / sent(from.size(axes));
    if (factor == 0) continue;
    out.traffic[key] = {.num_calls = entry.num_calls,
                        .num_bytes = static_cast<std::int64_t>(
                            static_cast<double>(entry.num_bytes) * factor + 0.5)};
  }
  out.tp_gradients = p.tp_gradients * from.size(fsdp) / to.size(fsdp);
  if (to.tp > 1)
    out.traffic[kSumOverTp].num_bytes +=
        static_cast<std::int64_t>(2 * sent(to.tp) * out.tp_gradients);
  if (to.dp_replicate > 1) {
    const std::int64_t gradients = out.dense.gradients + out.experts.gradients;
    if (gradients > 0)
      out.traffic[{"dp_replicate", comm::Collective::all_reduce}] = {
          .num_calls = 1,
          .num_bytes = static_cast<std::int64_t>(2 * sent(to.dp_replicate) *
                                                 static_cast<double>(gradients))};
  }
  return out;
}

// The smallest mesh that splits layers in the same way, with rings of two or more over dp if there
// is one.
MeshShape smallest(const MeshShape& mesh) {
  MeshShape s{.cp = mesh.cp,
              .tp = mesh.tp,
              .ep = mesh.ep,
              .etp = mesh.etp,
              .ranks_per_node = mesh.ranks_per_node};
  if (mesh.dp_shard > 1) {
    const int experts = 2 * s.ep * s.etp;
    s.dp_shard = 2;
    while (s.dp_shard * s.cp * s.tp % experts != 0) ++s.dp_shard;
  }
  return s.validated();
}

// Short models have the cut of sequences that the whole one has.
config::Settings one_micro_batch(const Config& config, const MeshShape& mesh) {
  config::Settings settings = config::mesh_settings(mesh, "estimate");
  settings.push_back({"training.global_batch_size", std::int64_t{0}, {"estimate"}});
  settings.push_back({"training.gradient_accumulation_steps", std::int64_t{1}, {"estimate"}});
  settings.push_back({"checkpoint.enable", false, {"estimate"}});
  settings.push_back({"parallelism.overlap_experts", false, {"estimate"}});
  if (mesh.cp > 1) {
    const auto sees = models::attention_options(config.model.architecture);
    const bool balanced = sequence_cut(config, sees, mesh.cp) == SequenceCut::balanced;
    settings.push_back({"parallelism.context_parallel_cut",
                        std::string(balanced ? "balanced" : "contiguous"),
                        {"estimate"}});
  }
  return settings;
}

// With fewer, three stages do not come to their peak.
std::int64_t micro_batches_to_peak(BackwardOrder stages) {
  return stages == BackwardOrder::in_halves ? 6 : 3;
}

Estimate later_step_of(const Config& config, int rank_of_pp, std::int64_t num_micro) {
  DryRank rank(config, rank_of_pp);
  rank.make_gradients();
  return rank.step(num_micro);
}

// The peak without the state, and without what micro-batches hold by the schedule.
double on_top(const Estimate& e, const std::string& schedule, std::int64_t num_micro) {
  const StageLive& s = e.live.stages[0];
  const auto order = pipeline::make_schedule(schedule, e.mesh.pp, 1, static_cast<int>(num_micro));
  return static_cast<double>(e.activations()) -
         pipeline::most_held(order.ranks[static_cast<size_t>(e.rank_of_pp)],
                             {.stages = {{.activation = static_cast<double>(s.activation),
                                          .kept_for_weights = static_cast<double>(s.kept)}}});
}

}  // namespace

Axes axes_of(const std::string& group) {
  // Made once: a search asks for every collective of every mesh.
  static const auto names = [] {
    std::vector<std::pair<Axes, std::string>> all;
    for (Axes axis : {pp, dp_replicate, dp_shard, cp, tp, efsdp, ep, etp, ep_nodes, ep_inside})
      all.emplace_back(axis, "|" + to_string(axis) + "|");
    return all;
  }();
  const std::string text = "|" + group + "|";
  Axes set = none;
  for (const auto& [axis, name] : names)
    if (text.find(name) != std::string::npos) set = set | axis;
  return set;
}

namespace {
void set_shares(const models::DecoderPlan& plan, ModelShape& shape) {
  const OneRankScope scope;
  const auto n = plan.config.num_layers;
  models::Stage last(plan, {.device = at::kMeta}, {n, n});
  double of_last = 0;
  last.each_param([&](const Stored& w) {
    if (w.storage != efsdp) of_last += static_cast<double>(c10::multiply_integers(w.spec.shape));
  });
  const auto embedding = static_cast<double>(plan.config.vocab * plan.config.dim);
  const double all = of_last + (last.embedding() ? 0 : embedding);
  shape.of_first = embedding / all, shape.of_last = of_last / all;
}

void set_muon(const Config& config, ModelShape& shape) {
  const OneRankScope scope;
  const auto whole = make_model(config, at::kMeta);
  whole->each_param([&](const Stored& w, bool) {
    if (!w.spec.trained || !optim::is_for_muon(w)) return;
    shape.muon_numbers += static_cast<double>(c10::multiply_integers(w.spec.shape));
    shape.muon_flops += optim::muon_flops(w, config.optimizer.muon_by_head);
  });
}
}  // namespace

ModelShape model_shape(const Config& config) {
  models::FlopsOfParts flops =
      models::flops_of_parts(config.model.architecture, config.data.sequence_length);
  return std::visit(
      [&](const auto& c) {
        const models::DecoderPlan plan = c.plan();
        ModelShape shape{.is_moe = {}, .flops = std::move(flops), .dim = c.dim};
        set_shares(plan, shape);
        if (config.optimizer.name == "muon") set_muon(config, shape);
        for (std::int64_t i = 0; i < c.num_layers; ++i) shape.is_moe.push_back(plan.is_moe(i));
        return shape;
      },
      config.model.architecture);
}

Profiler::Profiler(const Config& config)
    : config_(changed(config, {{"training.device", std::string("cuda"), {"estimate"}}})),
      shape_(model_shape(config_)) {}

const Profile& Profiler::measured(const MeshShape& mesh) {
  const Way key(mesh.cp, mesh.tp, mesh.ep, mesh.etp, mesh.dp_shard > 1);
  if (const auto found = known_.find(key); found != known_.end()) return found->second;
  const MeshShape small = smallest(mesh);
  const std::vector<Short> models = short_models(config_.model.architecture, shape_);
  std::vector<PartProfile> whole;
  double held = 0;  // from forward to backward, by the last of them
  config::Settings settings = one_micro_batch(config_, small);
  settings.push_back(
      {"parallelism.pipeline_parallel_layers_per_stage", std::string(), {"estimate"}});
  for (const Short& m : models) {
    const Config c = changed(config_, settings, config::RequestedModel{m.architecture, "estimate"});
    const Estimate e = estimate_later_micro_batch(c);
    whole.push_back(part(e));
    held = static_cast<double>(e.live.stages[0].activation);
    ++num_runs_;
  }
  Profile profile;
  each_longer(models, [&](size_t shorter, size_t longer, std::int64_t layers) {
    profile.layers[models[longer].is_moe.back()] =
        plus({}, plus(whole[longer], whole[shorter], -1), 1 / static_cast<double>(layers));
  });
  profile.ends = whole.back();
  for (const bool is_moe : models.back().is_moe) {
    profile.ends = plus(profile.ends, profile.layers.at(is_moe), -1);
    held -= profile.layers.at(is_moe).activations;
  }
  const double rest = profile.ends.activations;
  profile.ends.activations = std::clamp(held, 0.0, rest);
  profile.always = rest - profile.ends.activations;
  return known_.emplace(key, std::move(profile)).first->second;
}

// The first of three stages, or the one between, has the layers of a short model, the others one.
const Profiler::OfStages& Profiler::measured_stages(const MeshShape& mesh, BackwardOrder stages) {
  const std::pair key(Way(mesh.cp, mesh.tp, mesh.ep, mesh.etp, mesh.dp_shard > 1), stages);
  if (const auto found = known_stages_.find(key); found != known_stages_.end())
    return found->second;
  const auto& full = config_.model.architecture;
  // What comes and goes is that of a few layers; what halves keep is compared, layer by layer.
  const std::vector<Short> models = stages == BackwardOrder::in_halves
                                        ? short_models(full, shape_)
                                        : std::vector{shortened(full, 4, shape_.is_moe[0] ? 0 : 1)};
  const std::int64_t num_micro = micro_batches_to_peak(stages);
  MeshShape three_stages = smallest(mesh);
  three_stages.pp = 3;
  const std::string schedule = stages == BackwardOrder::in_halves   ? "zero_bubble"
                               : stages == BackwardOrder::after_all ? "gpipe"
                                                                    : "1f1b";
  const auto run = [&](int stage, int num_layers, int num_dense) {
    auto settings = one_micro_batch(config_, three_stages);
    const auto set = [&](const char* name, const std::string& value) {
      settings.push_back({name, value, {"estimate"}});
    };
    set("parallelism.pipeline_parallel_schedule", schedule);
    set("parallelism.pipeline_parallel_layers_per_stage",
        stage == 0 ? detail::concat(num_layers, ",1,1") : detail::concat("1,", num_layers, ",1"));
    const Short longer = shortened(full, num_layers + 2, num_dense);
    ++num_runs_;
    return later_step_of(
        changed(config_, settings, config::RequestedModel{longer.architecture, "estimate"}), stage,
        num_micro);
  };
  OfStages out;
  std::vector<double> kept;
  for (const Short& m : models) {
    const auto num = static_cast<int>(m.is_moe.size());
    const auto num_dense = static_cast<int>(std::count(m.is_moe.begin(), m.is_moe.end(), false));
    // Dense layers come first: those between are all dense, or all mixtures. It matters which is
    // the first of a stage: its sums travel on after backward.
    const Estimate between = run(1, num, num_dense == num ? num + 1 : num_dense);
    kept.push_back(static_cast<double>(between.live.stages[0].kept));
    if (&m != &models.back()) continue;
    out.always_between = on_top(between, schedule, num_micro);
    out.always_on_first = on_top(run(0, num, num_dense), schedule, num_micro);
  }
  each_longer(models, [&](size_t shorter, size_t longer, std::int64_t layers) {
    out.kept[models[longer].is_moe.back()] =
        std::max(0.0, kept[longer] - kept[shorter]) / static_cast<double>(layers);
  });
  return known_stages_.emplace(key, std::move(out)).first->second;
}

// What a stage holds where it frees parameters after use, and besides those of all its layers,
// once.
Profile Profiler::with_shared_gathers(const MeshShape& mesh, BackwardOrder stages) {
  if (!resharding_)
    resharding_ = std::make_unique<Profiler>(
        changed(config_, {{"parallelism.fsdp_reshard_after_forward", true, {"estimate"}}}));
  Profile out = resharding_->on(mesh, stages);
  const Profile own = on(mesh, BackwardOrder::one);
  const double ratio = config_.training.dtype == "bfloat16" ? 0.5 : 1;  // to the master weights
  for (auto& [is_moe, layer] : out.layers) {
    layer.traffic = own.layers.at(is_moe).traffic;
    // One rank that computes in the type of the weights takes them as they are.
    const auto whole = [&](std::int64_t shard, int size) {
      return ratio == 1 && size == 1 ? 0 : ratio * static_cast<double>(shard) * size;
    };
    layer.gathered = whole(layer.dense.weights, mesh.size(fsdp)) +
                     whole(layer.experts.weights, mesh.size(efsdp));
  }
  return out;
}

Profile Profiler::on(const MeshShape& mesh, BackwardOrder stages) {
  const MeshShape to = mesh.validated(), from = smallest(to);
  if (stages != BackwardOrder::one && !config_.parallelism.fsdp_reshard_after_forward)
    return with_shared_gathers(to, stages);
  const Profile& p = measured(to);
  Profile out{.layers = {}, .ends = rescaled(p.ends, from, to), .always = p.always};
  OfStages of_stages;
  if (stages != BackwardOrder::one) of_stages = measured_stages(to, stages);
  out.always_on_first = of_stages.always_on_first;
  out.always_between = of_stages.always_between;
  // While the sums of blocks travel, a rank gets its shards of them, which are in the peak as well:
  // two at most, and one counts, so that the rest errs on the side of more.
  double in_flight = 0;
  const auto gradients = [](const PartProfile& part) {
    return static_cast<double>(part.dense.gradients + part.experts.gradients);
  };
  for (const auto& [is_moe, layer] : p.layers) {
    out.layers[is_moe] = rescaled(layer, from, to);
    out.layers[is_moe].kept = of_stages.kept[is_moe];
    in_flight = std::max(in_flight, gradients(layer) - gradients(out.layers[is_moe]));
  }
  if (config_.parallelism.overlap_reductions)
    for (double* always : {&out.always, &out.always_on_first, &out.always_between})
      *always = std::max(0.0, *always - in_flight);
  return out;
}

}  // namespace moesh::estimate
