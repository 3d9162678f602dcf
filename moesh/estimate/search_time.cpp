#include "moesh/estimate/search_time.h"

#include <algorithm>
#include <map>

#include "moesh/base/error.h"
#include "moesh/config/merge.h"
#include "moesh/pipeline/schedule.h"

namespace moesh::estimate {
namespace {

using models::divisors;

constexpr const char *kMode = "activation_checkpoint.mode", *kBatch = "data.batch_size",
                     *kSchedule = "parallelism.pipeline_parallel_schedule",
                     *kOverlap = "parallelism.overlap_experts",
                     *kDispatcher = "parallelism.moe_dispatcher", *kLength = "data.sequence_length",
                     *kGlobalBatch = "training.global_batch_size";
constexpr double kAlike = 0.99;                // of a speed: no estimate is more precise
constexpr std::int64_t kTokensOfARank = 1024;  // with less, cp splits what is small already

bool is_set(const Config& config, const char* option) { return !config.origin(option).is_default; }

bool keeps(int wanted, int size) { return wanted == 1 || wanted == size; }

// How a layer is split: what a dry run depends on.
struct LayerSplit {
  int cp, tp, ep, etp;
  auto operator<=>(const LayerSplit&) const = default;
};

// What is searched besides the mesh, the fastest of each first.
struct Choices {
  std::vector<std::string> schedules, modes, dispatchers;
  std::vector<bool> overlaps;
  std::vector<std::int64_t> batches;

  explicit Choices(const Config& c)
      : schedules(pipeline::schedule_names()),
        modes{"none", "selective", "full"},
        dispatchers{"all_to_all", "two_hops"},
        overlaps{true, false},
        batches{1, 2, 4, 8} {
    std::erase(schedules, "gpipe");  // it takes as long as 1F1B, and holds more
    if (is_set(c, kSchedule)) schedules = {c.parallelism.pipeline_parallel_schedule};
    if (is_set(c, kMode)) modes = {c.activation_checkpoint.mode};
    if (is_set(c, kDispatcher)) dispatchers = {c.parallelism.moe_dispatcher};
    if (is_set(c, kOverlap)) overlaps = {c.parallelism.overlap_experts};
    const MeshShape mesh = mesh_shape(c);
    const std::int64_t whole = c.training.global_batch_size,
                       num_dp = std::int64_t{mesh.dp_replicate} * mesh.dp_shard;
    std::erase_if(batches, [&](std::int64_t b) { return whole == 0 || whole % (b * num_dp) != 0; });
    if (is_set(c, kBatch) || batches.empty()) batches = {c.data.batch_size};
  }
};

// A profiler for each mode, dispatcher and size of a micro-batch, made when it is needed.
class Profilers {
 public:
  explicit Profilers(const Config& config) : config_(config) {}
  Profiler& of(const std::string& mode, const std::string& dispatcher, std::int64_t batch) {
    auto& profiler = all_[{mode, dispatcher, batch}];
    if (!profiler)
      profiler =
          std::make_unique<Profiler>(changed(config_, {{kMode, mode, {"--search"}},
                                                       {kDispatcher, dispatcher, {"--search"}},
                                                       {kBatch, batch, {"--search"}}}));
    return *profiler;
  }
  int num_runs() const {
    int sum = 0;
    for (const auto& [key, profiler] : all_) sum += profiler->num_runs();
    return sum;
  }

 private:
  const Config& config_;
  std::map<std::tuple<std::string, std::string, std::int64_t>, std::unique_ptr<Profiler>> all_;
};

// Those that differ on this mesh: without ep none does, and two hops need nodes that share ep.
std::vector<std::string> dispatchers_of(const Choices& choices, const MeshShape& mesh) {
  if (choices.dispatchers.size() == 1) return choices.dispatchers;
  if (mesh.ep * mesh.etp == 1) return {"auto"};
  std::vector<std::string> some = choices.dispatchers;
  if (mesh.num_nodes_of_ep() <= 1) std::erase(some, "two_hops");
  if (mesh.num_nodes_of_ep() == 1) some.emplace_back("all_gather");
  return some;
}

// Whatever the run-time rules of a configuration would refuse, before a dry run does, and what is
// never fast.
bool is_tried(const Config& config, const Cluster& cluster, const MeshShape& asked,
              const LayerSplit& way) {
  const models::ModelFacts facts = models::facts(config.model.architecture);
  const std::int64_t length = config.data.sequence_length;
  return keeps(asked.cp, way.cp) && keeps(asked.tp, way.tp) && keeps(asked.ep, way.ep) &&
         facts.num_heads % way.tp == 0 &&
         (facts.num_kv_heads == 0 || facts.num_kv_heads % way.tp == 0) &&
         facts.num_key_heads % way.tp == 0 && (facts.takes_cp() || way.cp == 1) &&
         facts.num_experts % way.ep == 0 && way.cp * way.tp <= length &&
         (way.tp == asked.tp || way.tp <= cluster.gpus_per_node) &&
         (way.cp == asked.cp || way.cp * kTokensOfARank <= length);
}

// Whether a plan that is given makes as many stages as the schedule wants of each rank, and there
// is a layer for each stage.
bool fits_plan(const Config& config, const std::string& schedule, int num_ranks_of_pp) {
  if (num_ranks_of_pp == 1) return true;
  const auto num_layers = static_cast<int>(models::facts(config.model.architecture).num_layers);
  const int wanted = pipeline::stages_of_a_rank(schedule);
  const std::string& given = config.parallelism.pipeline_parallel_layers_per_stage;
  if (given.empty())
    return num_ranks_of_pp * pipeline::stages_of_a_rank(schedule, pipeline::kStagesOfARank) <=
           num_layers;
  const auto num = static_cast<int>(pipeline::given_plan(given, num_layers).size());
  const int each = num / num_ranks_of_pp;
  return num % num_ranks_of_pp == 0 && (wanted == 0 ? each >= 2 : each == wanted);
}

std::vector<MeshShape> meshes_of(const Config& config, const Choices& choices,
                                 const MeshShape& asked, int num_ranks, const LayerSplit& way) {
  std::vector<MeshShape> all;
  for (const auto stages : divisors(num_ranks / (way.cp * way.tp)))
    for (const auto copies : divisors(num_ranks / (way.cp * way.tp) / stages)) {
      const auto p = static_cast<int>(stages), replicate = static_cast<int>(copies);
      const int shard = num_ranks / (way.cp * way.tp) / p / replicate;
      const auto fits = [&](const std::string& s) { return fits_plan(config, s, p); };
      if (std::none_of(choices.schedules.begin(), choices.schedules.end(), fits) ||
          !keeps(asked.pp, p) || !keeps(asked.dp_replicate, replicate) ||
          !keeps(asked.dp_shard, shard) || shard * way.cp * way.tp % (way.ep * way.etp) != 0 ||
          config.training.global_batch_size %
                  (std::int64_t{replicate} * shard * choices.batches[0]) !=
              0)
        continue;
      all.push_back(MeshShape{.pp = p,
                              .dp_replicate = replicate,
                              .dp_shard = shard,
                              .cp = way.cp,
                              .tp = way.tp,
                              .ep = way.ep,
                              .etp = way.etp,
                              .ranks_per_node = asked.ranks_per_node}
                        .validated());
    }
  return all;
}

// The ways that split the dense layers alike: whatever the experts cost comes on top of the bound.
struct TimedFamily {
  // For each way to split layers, every pp and dp that makes up the cluster.
  std::vector<std::vector<MeshShape>> ways;
  double bound = 0;  // tokens/s that none of them exceeds
};

std::vector<TimedFamily> families(const Config& config, const Choices& choices,
                                  const Cluster& cluster) {
  const MeshShape asked = mesh_shape(config);
  const int num_ranks = cluster.num_gpus();
  std::vector<TimedFamily> all;
  for (const auto context : divisors(num_ranks))
    for (const auto tensor : divisors(num_ranks / context)) {
      TimedFamily family;
      for (const auto expert : divisors(models::facts(config.model.architecture).num_experts)) {
        std::vector<int> widths{asked.etp};
        if (asked.etp == 1 && tensor > 1) widths.push_back(static_cast<int>(tensor));
        for (const int width : widths) {
          const LayerSplit way{static_cast<int>(context), static_cast<int>(tensor),
                               static_cast<int>(expert), width};
          if (!is_tried(config, cluster, asked, way)) continue;
          auto meshes = meshes_of(config, choices, asked, num_ranks, way);
          if (!meshes.empty()) family.ways.push_back(std::move(meshes));
        }
      }
      if (!family.ways.empty()) all.push_back(std::move(family));
    }
  return all;
}

// Without pp, which the speed of a layer does not depend on.
MeshShape one_stage(MeshShape mesh) {
  mesh.dp_shard *= mesh.pp, mesh.pp = 1, mesh.efsdp = 0;
  return mesh.validated();
}

// Whether two micro-batches at a time hide anything, and what is tried then.
bool takes_overlap(const MeshShape& mesh, const std::string& schedule) {
  return mesh.ep * mesh.etp > 1 && (mesh.pp == 1 || pipeline::can_be_joined(schedule));
}
std::vector<bool> overlaps_of(const Choices& choices, const MeshShape& mesh,
                              const std::string& schedule) {
  const bool takes = choices.overlaps.size() == 1 || takes_overlap(mesh, schedule);
  return takes ? choices.overlaps : std::vector{false};
}

// How many axes a person has to think about.
int num_axes(const MeshShape& mesh) {
  int sum = 0;
  for (Axes axis : {pp, dp_replicate, dp_shard, cp, tp, ep, etp}) sum += mesh.size(axis) > 1;
  return sum;
}

// Steps in groups of about the same speed, the fastest first.
class SpeedGroups {
 public:
  explicit SpeedGroups(size_t most) : most_(most) {}

  /// No step that is slower can be in a group.
  double least() const { return least_; }

  void add(StepTime time) {
    const auto place = std::upper_bound(all_.begin(), all_.end(), time, is_faster);
    all_.insert(place, std::move(time));
    size_t begin = 0;
    for (size_t i = 0; i < most_ && begin < all_.size(); ++i) {
      least_ = i + 1 == most_ ? kAlike * all_[begin].tokens_per_second() : 0;
      begin = end_of(begin);
    }
    all_.resize(begin);
  }

  void write(TimeSearch& to) const {
    to.best.clear(), to.num_alike.clear();
    for (size_t begin = 0; begin < all_.size(); begin = end_of(begin)) {
      const auto first = all_.begin() + static_cast<std::ptrdiff_t>(begin),
                 last = all_.begin() + static_cast<std::ptrdiff_t>(end_of(begin));
      to.best.push_back(*std::min_element(first, last, [](const StepTime& a, const StepTime& b) {
        return num_axes(a.mesh) < num_axes(b.mesh);
      }));
      to.num_alike.push_back(static_cast<int>(last - first));
    }
  }

 private:
  static bool is_faster(const StepTime& a, const StepTime& b) {
    return a.tokens_per_second() > b.tokens_per_second();
  }
  size_t end_of(size_t begin) const {
    const double least = kAlike * all_[begin].tokens_per_second();
    size_t end = begin;
    while (end < all_.size() && all_[end].tokens_per_second() > least) ++end;
    return end;
  }

  size_t most_;
  std::vector<StepTime> all_ = {};
  double least_ = 0;
};

}  // namespace

Config with_sensible_sizes(const Config& config, const Cluster& cluster,
                           std::vector<std::string>& chosen) {
  config::Settings settings;
  const auto choose = [&](const char* option, const config::Value& value) {
    if (is_set(config, option)) return;
    settings.push_back({option, value, {"--search", true}});
    chosen.emplace_back(option);
  };
  choose("training.dtype", std::string("bfloat16"));
  choose("training.device", std::string("cuda"));
  const std::int64_t longest = models::facts(config.model.architecture).max_sequence;
  choose(kLength, std::min<std::int64_t>(4096, longest));
  // A multiple of all GPUs, so that every mesh has its micro-batches, and millions of tokens.
  const std::int64_t num = cluster.num_gpus(), batch = config.data.batch_size,
                     least = std::max<std::int64_t>(8, (1024 + num - 1) / num);
  if (!is_set(config, "training.gradient_accumulation_steps"))
    choose(kGlobalBatch, num * ((least + batch - 1) / batch * batch));
  return changed(config, settings);
}

std::vector<std::pair<std::string, std::string>> searched_options(const Config& config,
                                                                  const StepTime& found) {
  std::vector<std::pair<std::string, std::string>> all;
  if (!is_set(config, kMode)) all.emplace_back(kMode, found.recompute);
  if (!is_set(config, kBatch)) all.emplace_back(kBatch, std::to_string(found.batch_size));
  if (!is_set(config, kSchedule) && found.mesh.pp > 1) all.emplace_back(kSchedule, found.schedule);
  if (found.mesh.ep * found.mesh.etp > 1) {
    if (!is_set(config, kDispatcher)) all.emplace_back(kDispatcher, found.dispatcher);
    if (!is_set(config, kOverlap) && found.overlap_experts) all.emplace_back(kOverlap, "true");
  }
  return all;
}

std::vector<StepTime> ways_to_travel(const Config& config, const Cluster& cluster) {
  const Choices choices(config);
  Profilers profilers(config);
  const MeshShape mesh = mesh_shape(config).validated();
  std::vector<StepTime> all;
  for (const std::string& dispatcher : dispatchers_of(choices, mesh))
    for (const bool overlaps :
         overlaps_of(choices, mesh, config.parallelism.pipeline_parallel_schedule))
      all.push_back(step_time(
          profilers.of(config.activation_checkpoint.mode, dispatcher, config.data.batch_size),
          cluster, mesh, {config.parallelism.pipeline_parallel_schedule, overlaps}));
  std::stable_sort(all.begin(), all.end(),
                   [](const StepTime& a, const StepTime& b) { return a.total < b.total; });
  return all;
}

TimeSearch search_time(const Config& config, const Cluster& cluster, double limit, size_t most,
                       const Progress& progress) {
  const Choices choices(config);
  Profilers profilers(config);
  auto all = families(config, choices, cluster);
  TimeSearch result;
  int num_ways = 0, num_done = 0;
  for (const TimedFamily& f : all)
    for (const auto& meshes : f.ways)
      ++num_ways, result.num_meshes += static_cast<int>(meshes.size());
  SpeedGroups groups(most);
  const auto tell = [&] {
    result.num_runs = profilers.num_runs();
    groups.write(result);
    progress(num_done, num_ways, result);
  };

  // No step is faster than its compute and its collectives of tp and ep without latency, with the
  // largest micro-batches, whose experts have the most rows; recompute only adds to that.
  Cluster without_latency = cluster;
  without_latency.latency = 0;
  std::map<std::tuple<LayerSplit, std::string, std::string>, double> bounds;
  const auto bound_of = [&](const MeshShape& mesh, const std::string& mode,
                            const std::string& dispatcher) {
    const std::tuple key(LayerSplit{mesh.cp, mesh.tp, mesh.ep, mesh.etp}, mode, dispatcher);
    if (const auto found = bounds.find(key); found != bounds.end()) return found->second;
    return bounds[key] =
               fastest_tokens_per_second(profilers.of(mode, dispatcher, choices.batches.back()),
                                         without_latency, one_stage(mesh));
  };
  const auto bound = [&](const MeshShape& mesh, const std::string& mode) {
    double most = 0;
    for (const std::string& dispatcher : dispatchers_of(choices, mesh))
      most = std::max(most, bound_of(mesh, mode, dispatcher));
    return most;
  };
  for (TimedFamily& f : all) {
    MeshShape whole_experts = one_stage(f.ways[0][0]);
    whole_experts.ep = whole_experts.etp = 1, whole_experts.efsdp = 0;
    // A dispatcher may share a gather with the shared expert: a per cent for that.
    f.bound = 1.01 * fastest_tokens_per_second(
                         profilers.of(choices.modes[0], "auto", choices.batches.back()),
                         without_latency, whole_experts, /*with_any_ep=*/true);
    tell();
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const TimedFamily& a, const TimedFamily& b) { return a.bound > b.bound; });

  const auto is_hopeless = [&](double speed) { return speed <= groups.least(); };
  // The weakest recompute with which a step fits; larger micro-batches while they are faster.
  const auto try_order = [&](const MeshShape& mesh, const std::string& dispatcher,
                             const Order& order) {
    const auto num_dp = std::int64_t{mesh.dp_replicate} * mesh.dp_shard;
    double fastest = 0;
    for (const std::int64_t batch : choices.batches) {
      if (config.training.global_batch_size % (num_dp * batch) != 0) return;
      std::optional<StepTime> time;
      for (const std::string& mode : choices.modes) {
        if (is_hopeless(bound_of(mesh, mode, dispatcher))) return;
        ++result.num_timed;
        time = step_time_above(profilers.of(mode, dispatcher, batch), cluster, mesh, order,
                               groups.least(), limit);
        if (!time || time->peak <= limit) break;
      }
      if (!time) continue;
      if (time->peak > limit) return;
      const double speed = time->tokens_per_second();
      if (!is_hopeless(speed)) groups.add(*time);
      if (kAlike * speed < fastest) return;
      fastest = speed;
    }
  };
  const auto try_mesh = [&](const MeshShape& mesh, const std::string& schedule) {
    for (const std::string& dispatcher : dispatchers_of(choices, mesh))
      for (const bool overlaps : overlaps_of(choices, mesh, schedule))
        try_order(mesh, dispatcher, {schedule, overlaps});
  };
  // Meshes without pp and copies first: they are timed at once, and leave few of the others.
  for (const bool is_simple : {true, false}) {
    num_done = 0;
    for (const TimedFamily& f : all) {
      if (is_hopeless(f.bound)) break;
      for (const auto& meshes : f.ways) {
        ++num_done;
        tell();
        if (is_hopeless(bound(meshes[0], choices.modes[0]))) continue;
        for (const MeshShape& mesh : meshes)
          for (const std::string& schedule : choices.schedules) {
            if ((mesh.pp * mesh.dp_replicate == 1) == is_simple &&
                fits_plan(config, schedule, mesh.pp))
              try_mesh(mesh, schedule);
            if (mesh.pp == 1) break;
          }
      }
    }
  }
  num_done = num_ways;
  tell();
  return result;
}

}  // namespace moesh::estimate
