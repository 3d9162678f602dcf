#pragma once
// One world, two views:
//   dense:  pp x dp_replicate x dp_shard x cp x tp   attention, norms, dense MLP, router, shared expert
//   sparse: pp x dp_replicate x efsdp    x ep x etp  routed experts
// Both number the same ranks (the last axis fastest), so efsdp * ep * etp == dp_shard * cp * tp.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "moesh/comm/group.h"
#include "moesh/types/layout.h"

namespace moesh {

/// Sizes of the axes. efsdp = 0: what is left of dp_shard * cp * tp after ep * etp.
struct MeshShape {
  int pp = 1, dp_replicate = 1, dp_shard = 1, cp = 1, tp = 1;
  int efsdp = 0, ep = 1, etp = 1;
  int ranks_per_node = 0;  // ranks are numbered node by node; 0: all are on one node

  int num_ranks() const;
  /// The nodes over which the ranks of one ep group are spread, the same number of them on each; 0:
  /// some nodes have more of them than others. ep is ep_nodes x ep_inside, and ep_nodes is 1 then.
  int num_nodes_of_ep() const;
  /// The size of a set of axes: the product.
  int size(Axes set) const;
  /// A rank's place on a set of axes, the last axis fastest.
  int coordinate(int rank, Axes set) const;
  /// The number of the group to which a rank belongs: groups of ranks that differ only on these
  /// axes. Axes of one view only.
  int group_number(int rank, Axes set) const;
  /// The shape with efsdp filled in; throws Error (config) when sizes do not multiply up, naming
  /// them and what would work.
  MeshShape validated() const;
  /// The same, and the world must have exactly this many ranks.
  MeshShape validated(int world_size) const;
  /// "dp_shard=2 tp=2 ep=4", axes of size 1 left out, and ranks_per_node=2 where there are several
  /// nodes.
  std::string describe() const;

  bool operator==(const MeshShape&) const = default;
};

/// Every shape of exactly num_ranks ranks (pp = 1): each factorisation of the dense view with each
/// of the sparse one.
std::vector<MeshShape> all_mesh_shapes(int num_ranks);

/// Every second mesh of a list on nodes of 2 or of 4 ranks over which ep is spread, where there are
/// such: what sweeps try two_hops on.
MeshShape on_nodes_in_turn(MeshShape shape, std::size_t turn);

/// "tp", "dp_shard|cp"
std::string to_string(Axes set);

class Mesh {
 public:
  /// Splits the groups of all axes and of the products that are used. Every rank of `world` makes
  /// the same call; where ranks_per_node differs between processes, nodes are as good as unknown:
  /// 0.
  Mesh(comm::Group& world, const MeshShape& shape);

  /// Makes the group `name` of these world ranks, in which this rank has the place `rank`.
  using MakeGroup = std::function<std::shared_ptr<comm::Group>(const std::string& name, int rank,
                                                               const std::vector<int>& members)>;
  /// The mesh as one rank sees it, without asking the others: for worlds that are not there.
  Mesh(const MeshShape& shape, int rank, const MakeGroup& make);

  const MeshShape& shape() const { return shape_; }
  int rank() const { return rank_; }
  int size(Axes set) const { return shape_.size(set); }
  /// This rank's place on a set of axes, the last axis fastest: its rank in that group.
  int coordinate(Axes set) const;
  int coordinate(int rank, Axes set) const { return shape_.coordinate(rank, set); }
  /// The ranks that differ from this one only on these axes. Axes of one view only.
  const std::shared_ptr<comm::Group>& group(Axes set) const;

 private:
  Axes canonical(Axes set) const;
  template <class F>
  void make_groups(F make);

  MeshShape shape_;
  int rank_;
  std::map<Axes, std::shared_ptr<comm::Group>>
      groups_;  // by the axes of the set that are larger than 1
  std::shared_ptr<comm::Group> solo_;
};

/// Makes a mesh the one that typed collectives of this thread use, as long as the scope lives.
/// Backward runs on this thread then, on GPUs too. Autograd would run it on one of its own, which
/// has no mesh and which all ranks on a GPU have in common: their first collective would hang.
class MeshScope {
 public:
  explicit MeshScope(const Mesh& mesh);
  ~MeshScope();
  MeshScope(const MeshScope&) = delete;
  MeshScope& operator=(const MeshScope&) = delete;

 private:
  ScopedValue<const Mesh*> scope_;
  bool other_threads_;  // whether autograd might use them outside of the scope
};

/// The mesh of the innermost scope of this thread.
const Mesh& current_mesh();

}  // namespace moesh
