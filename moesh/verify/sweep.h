#pragma once
// Which meshes a sweep goes through: all of some sizes, a sample of them, one piece of the list.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "moesh/comm/mesh.h"

namespace moesh::verify {

/// `count` different meshes, the same for a seed on every machine.
struct MeshSample {
  int count;
  std::uint64_t seed = 0;
};

/// One of `count` pieces of a list, for machines that share the work: element i is in piece
/// i mod count, so every piece has meshes of every size.
struct SweepShard {
  int index = 1, count = 1;  // index from 1
};

/// A mesh, the schedule of its pipeline where it has one, whether the embedding is the head as
/// well: then both ends of the pipeline have it; and how its cp cuts sequences: meshes take turns.
/// Where nodes share ep, tokens take two hops.
struct SweepMesh {
  MeshShape shape;
  std::string schedule = "1f1b";
  bool is_tied = false;
  std::string cut = "auto";

  std::string describe() const;
};

/// Meshes of up to this many ranks go through every schedule; larger ones take one each, in turn.
constexpr int kEverySchedule = 4;
/// One in this many pipelines is tied: some of every schedule.
constexpr int kEveryTied = 3;

struct Sweep {
  int least_ranks = 1, most_ranks = 1;
  std::optional<MeshSample> sample = {};
  SweepShard shard = {};
  bool with_cp = true;  // false: only meshes whose cp is 1

  /// By number of ranks, never empty: a sweep of nothing would hold.
  std::vector<SweepMesh> meshes() const;
};

/// "8" is every mesh of up to 8 ranks, "5-8" every one of 5 to 8; throws Error (config) for what is
/// neither.
Sweep parse_sweep(const std::string& text);
/// "2/5" is the second of five pieces.
SweepShard parse_shard(const std::string& text);

}  // namespace moesh::verify
