#include "moesh/estimate/search_time.h"

#include <algorithm>
#include <map>

#include "moesh/base/error.h"

namespace moesh::estimate {
namespace {

using models::divisors;

bool keeps(int wanted, int size) { return wanted == 1 || wanted == size; }

// How a layer is split: what a dry run depends on.
struct Way {
  int cp, tp, ep, etp;
  auto operator<=>(const Way&) const = default;
};

// A way to split layers with every pp and dp that makes up the cluster.
struct Candidate {
  Way way;
  std::vector<MeshShape> meshes;
};

// Whatever the run-time rules of a configuration would refuse, before a dry run does.
bool divides(const Config& config, const Way& way) {
  const models::ModelFacts facts = models::facts(config.model.architecture);
  return facts.num_heads % way.tp == 0 &&
         (facts.num_kv_heads == 0 || facts.num_kv_heads % way.tp == 0) &&
         facts.num_experts % way.ep == 0 && way.cp * way.tp <= config.data.sequence_length;
}

// Whether a plan that is given makes as many stages as the schedule wants of each rank.
bool fits_plan(const Config& config, int num_ranks_of_pp) {
  const auto& p = config.parallelism;
  if (num_ranks_of_pp == 1 || p.pipeline_parallel_layers_per_stage.empty()) return true;
  const auto facts = models::facts(config.model.architecture);
  const auto num = static_cast<int>(
      pipeline::given_plan(p.pipeline_parallel_layers_per_stage, static_cast<int>(facts.num_layers))
          .size());
  const int wanted = pipeline::stages_of_a_rank(p.pipeline_parallel_schedule),
            each = num / num_ranks_of_pp;
  return num % num_ranks_of_pp == 0 && (wanted == 0 ? each >= 2 : each == wanted);
}

std::vector<MeshShape> meshes_of(const Config& config, const MeshShape& asked, int num_ranks,
                                 int most_pp, const Way& way) {
  std::vector<MeshShape> all;
  const std::int64_t global = config.training.global_batch_size;
  for (const auto stages : divisors(num_ranks / (way.cp * way.tp)))
    for (const auto copies : divisors(num_ranks / (way.cp * way.tp) / stages)) {
      const auto p = static_cast<int>(stages), replicate = static_cast<int>(copies);
      const int shard = num_ranks / (way.cp * way.tp) / p / replicate;
      if (p > most_pp || !fits_plan(config, p) || !keeps(asked.pp, p) ||
          !keeps(asked.dp_replicate, replicate) || !keeps(asked.dp_shard, shard) ||
          shard * way.cp * way.tp % (way.ep * way.etp) != 0)
        continue;
      if (global % (static_cast<std::int64_t>(replicate) * shard * config.data.batch_size) != 0)
        continue;
      all.push_back(MeshShape{.pp = p,
                              .dp_replicate = replicate,
                              .dp_shard = shard,
                              .cp = way.cp,
                              .tp = way.tp,
                              .ep = way.ep,
                              .etp = way.etp}
                        .validated());
    }
  return all;
}

std::vector<Candidate> candidates(const Config& config, const MeshShape& asked, int num_ranks,
                                  int most_pp) {
  std::vector<Candidate> all;
  const models::ModelFacts facts = models::facts(config.model.architecture);
  for (const auto context : divisors(num_ranks))
    for (const auto tensor : divisors(num_ranks / context))
      for (const auto expert : divisors(facts.num_experts)) {
        const auto cp_size = static_cast<int>(context), tp_size = static_cast<int>(tensor),
                   ep_size = static_cast<int>(expert);
        std::vector<int> widths{asked.etp};
        if (asked.etp == 1 && tp_size > 1) widths.push_back(tp_size);
        for (const int etp_size : widths) {
          const Way way{cp_size, tp_size, ep_size, etp_size};
          if (!keeps(asked.cp, cp_size) || !keeps(asked.tp, tp_size) || !keeps(asked.ep, ep_size) ||
              !divides(config, way))
            continue;
          auto meshes = meshes_of(config, asked, num_ranks, most_pp, way);
          if (!meshes.empty()) all.push_back({way, std::move(meshes)});
        }
      }
  return all;
}

// Without pp, which the speed of a layer does not depend on.
MeshShape one_stage(MeshShape mesh) {
  mesh.dp_shard *= mesh.pp, mesh.pp = 1, mesh.efsdp = 0;
  return mesh.validated();
}

// The ways that split the dense layers alike: whatever the experts cost comes on top of the bound.
struct TimedFamily {
  std::vector<Candidate> candidates;
  double bound = 0;  // tokens/s that none of them exceeds
};

std::vector<TimedFamily> families(Profiler& profiler, const Cluster& cluster,
                                  std::vector<Candidate> all, const std::function<void()>& tell) {
  std::map<std::pair<int, int>, TimedFamily> by_dense;
  for (Candidate& c : all) by_dense[{c.way.cp, c.way.tp}].candidates.push_back(std::move(c));
  std::vector<TimedFamily> sorted;
  for (auto& [key, family] : by_dense) {
    MeshShape whole_experts = one_stage(family.candidates[0].meshes[0]);
    whole_experts.ep = whole_experts.etp = 1, whole_experts.efsdp = 0;
    // A dispatcher may share a gather with the shared expert: a per cent for that.
    family.bound = 1.01 * fastest_tokens_per_second(profiler, cluster, whole_experts);
    sorted.push_back(std::move(family));
    tell();
  }
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const TimedFamily& a, const TimedFamily& b) { return a.bound > b.bound; });
  return sorted;
}

void keep(std::vector<StepTime>& best, StepTime time, size_t most) {
  const auto place =
      std::upper_bound(best.begin(), best.end(), time, [](const StepTime& a, const StepTime& b) {
        return a.tokens_per_second() > b.tokens_per_second();
      });
  best.insert(place, std::move(time));
  if (best.size() > most) best.pop_back();
}

}  // namespace

TimeSearch search_time(Profiler& profiler, const Cluster& cluster, const MeshShape& asked,
                       const PipelineOptions& options, double limit, size_t most,
                       const Progress& progress) {
  const int fixed = pipeline::stages_of_a_rank(options.schedule),
            v = fixed == 0 ? options.stages_of_a_rank : fixed,
            most_pp = std::max(1, static_cast<int>(profiler.model().is_moe.size()) / v);
  auto all = candidates(profiler.config(), asked, cluster.num_gpus(), most_pp);
  TimeSearch result;
  for (const Candidate& c : all) result.num_meshes += static_cast<int>(c.meshes.size());
  const int num_ways = static_cast<int>(all.size());
  int num_done = 0;
  const auto tell = [&] {
    result.num_runs = profiler.num_runs();
    progress(num_done, num_ways, result);
  };
  const auto is_hopeless = [&](double bound) {
    return result.best.size() == most && bound <= result.best.back().tokens_per_second();
  };
  for (const TimedFamily& family : families(profiler, cluster, std::move(all), tell)) {
    if (is_hopeless(family.bound)) break;
    for (const Candidate& c : family.candidates) {
      ++num_done;
      tell();
      if (is_hopeless(fastest_tokens_per_second(profiler, cluster, one_stage(c.meshes[0]))))
        continue;
      for (const MeshShape& mesh : c.meshes) {
        ++result.num_timed;
        StepTime time = step_time(profiler, cluster, mesh, options);
        if (time.peak <= limit) keep(result.best, std::move(time), most);
      }
    }
  }
  num_done = num_ways;
  tell();
  return result;
}

}  // namespace moesh::estimate
