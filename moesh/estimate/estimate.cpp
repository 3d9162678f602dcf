#include "moesh/estimate/estimate.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "moesh/base/error.h"
#include "moesh/config/merge.h"
#include "moesh/estimate/dry_rank.h"
#include "moesh/estimate/profile.h"
#include "moesh/pipeline/schedule.h"

namespace moesh::estimate {

using namespace train;
namespace {

// A step as the ranks of pp go through it. One micro-batch after the other does the same: a dry run
// of the first ones gives what all of them take.
class Pipeline {
 public:
  explicit Pipeline(const Config& config)
      : config_(config),
        options_(pipeline_options(config)),
        shape_(mesh_shape(config)),
        num_gone_through_(enough_micro_batches(config)),
        num_micro_(num_micro_batches(config)),
        schedule_(schedule_with(num_micro_)) {
    std::int64_t begin = 0;
    for (const int n : stage_plan(config)) {
      stages_.push_back({begin, begin + n});
      begin += n;
    }
  }

  std::int64_t num_micro() const { return num_micro_; }
  std::int64_t num_gone_through() const { return num_gone_through_; }

  std::vector<models::LayerRange> layers_of(int rank) const {
    std::vector<models::LayerRange> mine;
    for (const int stage : stages_of(rank)) mine.push_back(stages_[static_cast<size_t>(stage)]);
    return mine;
  }

  // Ranks with the same layers, one after the other. What a layer computes tells its kind.
  std::vector<RankKind> kinds() const {
    if (shape_.pp == 1) return {{.ranks = {0}}};
    const ModelShape model = model_shape(config_);
    const auto num_layers = static_cast<std::int64_t>(model.is_moe.size());
    using LayerKinds = std::vector<std::pair<int, double>>;
    std::map<std::vector<LayerKinds>, size_t> known;
    std::vector<RankKind> all;
    for (int rank = 0; rank < shape_.pp; ++rank) {
      std::vector<LayerKinds> mine;
      for (const auto& [begin, end] : layers_of(rank)) {
        LayerKinds& stage = mine.emplace_back();
        stage.emplace_back(begin == 0, end == num_layers);
        for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i)
          stage.emplace_back(model.is_moe[i], model.flops.layers[i]);
      }
      const auto [found, is_new] = known.emplace(std::move(mine), all.size());
      if (is_new) all.emplace_back();
      all[found->second].ranks.push_back(rank);
    }
    return all;
  }

  // The one that holds the most among ranks that are alike. They differ in how many micro-batches
  // they work on at once.
  Estimate most_of(const std::vector<int>& alike) const {
    Estimate e = of_rank(alike[0]);
    const auto most = std::max_element(alike.begin(), alike.end(), [&](int a, int b) {
      return most_held(a, e, schedule_) < most_held(b, e, schedule_);
    });
    return *most == alike[0] ? e : of_rank(*most);
  }

  // For all micro-batches, where `e` has gone through some of them.
  comm::Ledger traffic_of(const Estimate& e) const {
    return num_gone_through_ == num_micro_ ? e.traffic : traffic_of_rank(e.rank_of_pp);
  }
  // The second and each later micro-batch send the same; where they go in pairs, the second and
  // each later pair do.
  comm::Ledger traffic_of_rank(int rank) const {
    const std::int64_t together = config_.parallelism.overlap_experts ? 2 : 1,
                       begin = together + num_micro_ % together,
                       num_more = (num_micro_ - begin) / together - 1;
    comm::Ledger all = DryRank(config_, rank).step(begin + together).traffic, more = all;
    add(more, DryRank(config_, rank).step(begin).traffic, -1);
    add(all, more, static_cast<double>(num_more));
    return all;
  }

 private:
  pipeline::Schedule schedule_with(std::int64_t num_micro) const {
    return schedule_of(options_, shape_.pp, static_cast<std::size_t>(num_micro));
  }
  std::vector<int> stages_of(int rank) const {
    std::vector<int> mine;
    for (int stage = 0; stage < schedule_.num_stages; ++stage)
      if (schedule_.rank_with(stage) == rank) mine.push_back(stage);
    return mine;
  }

  Estimate of_rank(int rank) const {
    Estimate e = DryRank(config_, rank).step(num_gone_through_);
    if (num_gone_through_ == num_micro_) return e;
    e.live.num_alive = most_alive(schedule_.ranks[static_cast<size_t>(rank)]);
    e.peak += most_held(rank, e, schedule_) - most_held(rank, e, schedule_with(num_gone_through_)) +
              (num_micro_ - num_gone_through_) * e.live.tokens;
    return e;
  }

  // The most bytes that gradients and micro-batches hold on a rank which is like that of `e`.
  std::int64_t most_held(int rank, const Estimate& e, const pipeline::Schedule& s) const {
    pipeline::Costs costs{.stages =
                              std::vector<pipeline::StageCosts>(static_cast<size_t>(s.num_stages))};
    const auto bytes = [](std::int64_t n) { return static_cast<double>(n); };
    const auto num_live = static_cast<std::int64_t>(e.live.stages.size());
    const std::vector<int> mine = stages_of(rank);
    for (size_t i = 0; i < mine.size(); ++i) {
      const StageLive& l = e.live.stages[i];
      costs.stages[static_cast<size_t>(mine[i])] = {
          .activation = bytes(l.activation),
          .kept_for_weights = bytes(l.kept),
          .in_forward = bytes(l.in_forward),
          .in_backward = bytes(l.in_backward),
          .in_weights = bytes(l.in_weights),
          .gradients = bytes(e.state.gradients / num_live)};
    }
    return static_cast<std::int64_t>(
        pipeline::most_held(s.ranks[static_cast<size_t>(rank)], costs));
  }

  const Config& config_;
  train::PipelineOptions options_;
  MeshShape shape_;
  std::int64_t num_gone_through_, num_micro_;
  pipeline::Schedule schedule_;
  std::vector<models::LayerRange> stages_;
};

std::int64_t multiple(std::int64_t n, double times) {
  return std::llround(times * static_cast<double>(n));
}

std::int64_t sum_of(const comm::Ledger& traffic) {
  std::int64_t sum = 0;
  for (const auto& [key, entry] : traffic) sum += entry.num_bytes;
  return sum;
}

}  // namespace

StateMemory StateMemory::plus(const StateMemory& other, double times) const {
  return {weights + multiple(other.weights, times), gradients + multiple(other.gradients, times),
          optimizer + multiple(other.optimizer, times)};
}

void add(comm::Ledger& to, const comm::Ledger& other, double times) {
  for (const auto& [key, entry] : other) {
    to[key].num_bytes += multiple(entry.num_bytes, times);
    to[key].num_calls += multiple(entry.num_calls, times);
  }
}

int most_alive(const std::vector<pipeline::Action>& actions) {
  return static_cast<int>(
      pipeline::most_held(actions, {.stages = {{.activation = 1, .kept_for_weights = 0}}}));
}

int most_halves(const std::vector<pipeline::Action>& actions) {
  return static_cast<int>(
      pipeline::most_held(actions, {.stages = {{.activation = 0, .kept_for_weights = 1}}}));
}

std::int64_t Estimate::moved() const { return sum_of(traffic); }

std::int64_t enough_micro_batches(const Config& config) {
  // Interleaved stages go in groups of p micro-batches, the first of which has the rest.
  const bool in_groups =
      pipeline::stages_of_a_rank(config.parallelism.pipeline_parallel_schedule) == 0;
  const std::int64_t all = num_micro_batches(config), p = mesh_shape(config).pp,
                     enough = in_groups ? 3 * p : 2 * p + 2;
  return all <= enough ? all : enough + (all - enough) % p;
}

std::vector<StateMemory> state_of_ranks(const Config& config) {
  std::vector<StateMemory> all;
  for (int rank = 0; rank < mesh_shape(config).pp; ++rank)
    all.push_back(DryRank(config, rank).state());
  return all;
}

Estimate estimate(const Config& config) {
  const Pipeline pipe(config);
  std::vector<RankKind> kinds = pipe.kinds();
  comm::Ledger traffic;
  std::optional<Estimate> most;
  for (RankKind& kind : kinds) {
    const Estimate& e = kind.most = pipe.most_of(kind.ranks);
    kind.layers = pipe.layers_of(e.rank_of_pp);
    kind.sent = sum_of(pipe.traffic_of(e));
    if (kind.ranks[0] == 0)
      traffic = e.rank_of_pp == 0 ? pipe.traffic_of(e) : pipe.traffic_of_rank(0);
    if (!most || e.peak > most->peak) most = e;
  }
  most->kinds = std::move(kinds);
  most->num_tokens = most->num_tokens / pipe.num_gone_through() * pipe.num_micro();
  most->traffic = std::move(traffic);
  return *most;
}

namespace {
// Each rank of cp has a piece of the sequence, and that of the last one sees all before it.
int rank_of_cp_that_works_longest(const Config& config) { return mesh_shape(config).cp - 1; }
}  // namespace

Estimate estimate_later_micro_batch(const Config& config) {
  DryRank rank(config, 0, rank_of_cp_that_works_longest(config));
  rank.note_operations();
  rank.make_gradients();
  return rank.step(num_micro_batches(config));
}

namespace {

formats::JsonValue to_json(const RankKind& k) {
  const Estimate& e = k.most;
  formats::JsonList ranks, layers, activation, kept;
  for (const int rank : k.ranks) ranks.push_back({std::int64_t{rank}});
  for (const auto& [begin, end] : k.layers) layers.push_back({formats::JsonList{{begin}, {end}}});
  for (const StageLive& s : e.live.stages)
    activation.push_back({s.activation}), kept.push_back({s.kept});
  return {formats::JsonObject{{"ranks", {std::move(ranks)}},
                              {"rank", {std::int64_t{e.rank_of_pp}}},
                              {"layers", {std::move(layers)}},
                              {"parameters", {e.num_stage_parameters}},
                              {"weights", {e.state.weights}},
                              {"gradients", {e.state.gradients}},
                              {"optimizer", {e.state.optimizer}},
                              {"activations", {e.activations()}},
                              {"peak", {e.peak}},
                              {"sent", {k.sent}},
                              {"alive", {std::int64_t{e.live.num_alive}}},
                              {"activation", {std::move(activation)}},
                              {"halves", {std::int64_t{e.live.num_halves}}},
                              {"kept", {std::move(kept)}}}};
}

}  // namespace

formats::JsonValue to_json(const Estimate& e) {
  using formats::JsonObject;
  formats::JsonList traffic, kinds;
  for (const RankKind& kind : e.kinds) kinds.push_back(to_json(kind));
  for (const auto& [key, entry] : e.traffic)
    traffic.push_back({JsonObject{{"group", {key.first}},
                                  {"collective", {std::string(comm::to_string(key.second))}},
                                  {"calls", {std::int64_t{entry.num_calls}}},
                                  {"bytes", {std::int64_t{entry.num_bytes}}}}});
  return {JsonObject{{"mesh", {e.mesh.describe()}},
                     {"ranks", {std::int64_t{e.mesh.num_ranks()}}},
                     {"parameters", {e.num_parameters}},
                     {"active_parameters", {e.num_active_parameters}},
                     {"tokens", {e.num_tokens}},
                     {"weights", {e.state.weights}},
                     {"gradients", {e.state.gradients}},
                     {"optimizer", {e.state.optimizer}},
                     {"activations", {e.activations()}},
                     {"peak", {e.peak}},
                     {"rank_of_pp", {std::int64_t{e.rank_of_pp}}},
                     {"pipeline", {std::move(kinds)}},
                     {"sent", {e.moved()}},
                     {"traffic", {std::move(traffic)}}}};
}

}  // namespace moesh::estimate
