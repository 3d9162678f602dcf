#include "moesh/verify/verify.h"

#include <algorithm>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/random.h"
#include "moesh/base/text.h"
#include "moesh/pipeline/schedule.h"

namespace moesh::verify {
namespace {

// "A<separator>B", two whole numbers, 1 or more.
std::optional<std::pair<int, int>> two_numbers(const std::string& text, char separator) {
  const auto parts = split(text, separator);
  if (parts.size() != 2) return {};
  const auto a = number_of<int>(parts[0]), b = number_of<int>(parts[1]);
  if (!a || !b || *a < 1 || *b < 1) return {};
  return {{*a, *b}};
}

// The chosen ones, in the order in which they were. (Fisher-Yates, stopped after `count`.)
std::vector<SweepMesh> sampled(std::vector<SweepMesh> all, const MeshSample& sample) {
  const Random random(sample.seed, "meshes of a sweep");
  std::vector<size_t> order(all.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto count = static_cast<size_t>(sample.count);
  for (size_t i = 0; i < count; ++i)
    std::swap(order[i], order[i + random.below(i, order.size() - i)]);
  std::sort(order.begin(), order.begin() + sample.count);
  std::vector<SweepMesh> chosen;
  for (size_t i = 0; i < count; ++i) chosen.push_back(all[order[i]]);
  return chosen;
}

// With every size of pp.
std::vector<SweepMesh> all_meshes(int num_ranks) {
  const auto& schedules = pipeline::schedule_names();
  std::vector<SweepMesh> all;
  size_t turn = static_cast<size_t>(num_ranks);
  size_t num_pipelines = static_cast<size_t>(num_ranks), num_shapes = 0, num_cuts = 0;
  const auto add = [&](SweepMesh mesh) {
    if (mesh.shape.cp > 1) mesh.cut = num_cuts++ % 2 == 0 ? "balanced" : "contiguous";
    if (mesh.shape.pp > 1) {
      // Others in each round through the schedules, of which there may be a multiple of kEveryTied.
      const size_t shift = ++num_pipelines / schedules.size();
      mesh.is_tied = (num_pipelines + shift) % kEveryTied == 0;
    }
    all.push_back(std::move(mesh));
  };
  for (int stages = 1; stages <= num_ranks; ++stages) {
    if (num_ranks % stages != 0) continue;
    for (MeshShape shape : all_mesh_shapes(num_ranks / stages)) {
      shape.pp = stages;
      if (shape.ep > 1) shape = on_nodes_in_turn(shape, num_shapes++);
      if (stages == 1)
        add({shape});
      else if (num_ranks <= kEverySchedule)
        for (const std::string& schedule : schedules) add({shape, schedule});
      else
        add({shape, schedules[turn++ % schedules.size()]});
    }
  }
  return all;
}

}  // namespace

std::string SweepMesh::describe() const {
  const std::string of_shape =
      shape.cp == 1 ? shape.describe() : detail::concat(shape.describe(), " ", cut);
  if (shape.pp == 1) return of_shape;
  return detail::concat(of_shape, " ", schedule, is_tied ? " tied" : "");
}

std::vector<SweepMesh> Sweep::meshes() const {
  std::vector<SweepMesh> all;
  for (int n = least_ranks; n <= most_ranks; ++n)
    for (SweepMesh& mesh : all_meshes(n))
      if (with_cp || mesh.shape.cp == 1) all.push_back(std::move(mesh));
  if (sample) {
    MOESH_CHECK(sample->count >= 1 && static_cast<size_t>(sample->count) <= all.size(),
                ErrorKind::config, "--sample ", sample->count, " of the ", all.size(),
                " meshes with ", least_ranks, " to ", most_ranks,
                " ranks; take 1 or more and no more than there are");
    all = sampled(std::move(all), *sample);
  }
  std::vector<SweepMesh> mine;
  for (size_t i = static_cast<size_t>(shard.index - 1); i < all.size();
       i += static_cast<size_t>(shard.count))
    mine.push_back(all[i]);
  MOESH_CHECK(!mine.empty(), ErrorKind::config, "--shard ", shard.index, "/", shard.count,
              " has no mesh: there are ", all.size(), "; use no more shards than that");
  return mine;
}

Sweep parse_sweep(const std::string& text) {
  const auto range = two_numbers(text.find('-') == text.npos ? "1-" + text : text, '-');
  MOESH_CHECK(range && range->first <= range->second, ErrorKind::config, "--sweep is '", text,
              "'; it takes the most ranks that a mesh may have, as in 8, or the least and the "
              "most, as in 5-8");
  return {.least_ranks = range->first, .most_ranks = range->second};
}

SweepShard parse_shard(const std::string& text) {
  const auto shard = two_numbers(text, '/');
  MOESH_CHECK(shard && shard->first <= shard->second, ErrorKind::config, "--shard is '", text,
              "'; it takes which piece of how many, as in 2/5 for the second of five");
  return {.index = shard->first, .count = shard->second};
}

}  // namespace moesh::verify
