#include "moesh/comm/mesh.h"

#include <ATen/ops/tensor.h>
#include <c10/core/AutogradState.h>

#include <algorithm>
#include <array>

#include "moesh/base/error.h"
#include "moesh/comm/launch.h"

namespace moesh {
namespace {

thread_local const Mesh* scoped_mesh = nullptr;  // a rank is a thread, and has one mesh

// From slow to fast, as each view numbers the ranks.
constexpr Axes kDenseAxes[] = {pp, dp_replicate, dp_shard, cp, tp};
constexpr Axes kSparseAxes[] = {pp, dp_replicate, efsdp, ep, etp};
constexpr Axes kSparseOnly = efsdp | ep | etp | ep_nodes | ep_inside;
constexpr Axes kDenseOnly = dp_shard | cp | tp;

// Every set of axes over which something is ever gathered or summed: compute axes, storage, and
// gradients of parameters.
constexpr Axes kUsed[] = {dp,
                          cp,
                          tp,
                          dp | cp,
                          dp | tp,
                          cp | tp,
                          dp | cp | tp,
                          fsdp,
                          fsdp | tp,
                          dp_replicate,
                          dp_replicate | tp,
                          edp,
                          ep,
                          etp,
                          edp | ep,
                          edp | etp,
                          ep | etp,
                          edp | ep | etp,
                          efsdp,
                          efsdp | ep,
                          efsdp | etp,
                          efsdp | ep | etp,
                          dp_replicate | ep,
                          dp_replicate | etp,
                          dp_replicate | ep | etp,
                          dp_shard,
                          pp,
                          ep_nodes,
                          ep_inside,
                          ep_inside | etp};

const char* axis_name(Axes axis) {
  switch (axis) {
    case pp: return "pp";
    case dp_replicate: return "dp_replicate";
    case dp_shard: return "dp_shard";
    case cp: return "cp";
    case tp: return "tp";
    case efsdp: return "efsdp";
    case ep: return "ep";
    case etp: return "etp";
    case ep_nodes: return "ep_nodes";
    case ep_inside: return "ep_inside";
    default: return "?";
  }
}

int axis_size(const MeshShape& s, Axes axis) {
  switch (axis) {
    case pp: return s.pp;
    case dp_replicate: return s.dp_replicate;
    case dp_shard: return s.dp_shard;
    case cp: return s.cp;
    case tp: return s.tp;
    case efsdp: return s.efsdp;
    case ep: return s.ep;
    case etp: return s.etp;
    case ep_nodes: return std::max(1, s.num_nodes_of_ep());
    case ep_inside: return s.ep / axis_size(s, ep_nodes);
    default: return 1;
  }
}

int axis_coordinate(const MeshShape& s, int rank, Axes axis) {
  if (axis == ep_nodes) return axis_coordinate(s, rank, ep) / axis_size(s, ep_inside);
  if (axis == ep_inside) return axis_coordinate(s, rank, ep) % axis_size(s, ep_inside);
  const auto& order = contains(kSparseOnly, axis) ? kSparseAxes : kDenseAxes;
  for (int i = 4; i >= 0; --i) {
    if (order[i] == axis) return rank % axis_size(s, axis);
    rank /= axis_size(s, order[i]);
  }
  return 0;
}

// From slow to fast.
template <class F>
void each_axis(Axes set, F f) {
  for (Axes axis : {pp, dp_replicate, dp_shard, cp, tp, efsdp, ep, ep_nodes, ep_inside, etp})
    if (contains(set, axis)) f(axis);
}

std::vector<int> divisors(int n) {
  std::vector<int> all;
  for (int d = 1; d <= n / d; ++d) {
    if (n % d != 0) continue;
    all.push_back(d);
    if (d != n / d) all.push_back(n / d);
  }
  std::sort(all.begin(), all.end());
  return all;
}

}  // namespace

int MeshShape::num_ranks() const { return pp * dp_replicate * dp_shard * cp * tp; }

int MeshShape::num_nodes_of_ep() const {
  const int block = ep * etp;  // ranks of consecutive numbers
  if (ranks_per_node == 0 || ranks_per_node % block == 0) return 1;
  if (block % ranks_per_node != 0) return 0;
  if (etp % ranks_per_node == 0) return ep;
  return ranks_per_node % etp == 0 ? block / ranks_per_node : 0;
}

int MeshShape::size(Axes set) const {
  int n = 1;
  each_axis(set, [&](Axes a) { n *= axis_size(*this, a); });
  return n;
}

int MeshShape::coordinate(int rank, Axes set) const {
  int place = 0;
  each_axis(set,
            [&](Axes a) { place = place * axis_size(*this, a) + axis_coordinate(*this, rank, a); });
  return place;
}

int MeshShape::group_number(int rank, Axes set) const {
  const bool is_sparse = (set & kSparseOnly) != none;
  int number = 0;  // by the places on all other axes of the view
  for (Axes a : is_sparse ? kSparseAxes : kDenseAxes) {
    // The half of ep that is not in the set.
    if (a == Axes::ep && contains(set, ep_nodes))
      a = ep_inside;
    else if (a == Axes::ep && contains(set, ep_inside))
      a = ep_nodes;
    if (!contains(set, a)) number = number * axis_size(*this, a) + axis_coordinate(*this, rank, a);
  }
  return number;
}

MeshShape MeshShape::validated() const {
  for (Axes a :
       {Axes::pp, Axes::dp_replicate, Axes::dp_shard, Axes::cp, Axes::tp, Axes::ep, Axes::etp})
    MOESH_CHECK(axis_size(*this, a) >= 1, ErrorKind::config, "mesh: ", axis_name(a), " is ",
                axis_size(*this, a), "; every axis has a size of 1 or more");
  MOESH_CHECK(efsdp >= 0, ErrorKind::config, "mesh: efsdp is ", efsdp,
              "; use 0 (what is left) or a size");
  MOESH_CHECK(ranks_per_node >= 0, ErrorKind::config, "mesh: ranks_per_node is ", ranks_per_node,
              "; use 0 (all ranks on one node) or a number of ranks");
  const int dense = dp_shard * cp * tp, experts = ep * etp;
  MOESH_CHECK(dense % experts == 0, ErrorKind::config, "mesh: ep * etp = ", ep, " * ", etp, " = ",
              experts, " does not divide dp_shard * cp * tp = ", dp_shard, " * ", cp, " * ", tp,
              " = ", dense, "; the experts use the same ranks, so ep * etp must be one of ",
              divisors(dense));
  MeshShape s = *this;
  if (s.efsdp == 0) s.efsdp = dense / experts;
  MOESH_CHECK(s.efsdp * experts == dense, ErrorKind::config, "mesh: efsdp * ep * etp = ", efsdp,
              " * ", ep, " * ", etp, " = ", efsdp * experts, ", and dp_shard * cp * tp = ", dense,
              "; set efsdp to ", dense / experts, " or leave it out");
  return s;
}

MeshShape MeshShape::validated(int world_size) const {
  const MeshShape s = validated();
  MOESH_CHECK(s.num_ranks() == world_size, ErrorKind::config,
              "mesh: pp * dp_replicate * dp_shard * cp * tp = ", pp, " * ", dp_replicate, " * ",
              dp_shard, " * ", cp, " * ", tp, " = ", s.num_ranks(), ", and the world has ",
              world_size, " ranks; start ", s.num_ranks(),
              " ranks, or change a size so that the product is ", world_size);
  return s;
}

std::string MeshShape::describe() const {
  std::string text;
  each_axis(static_cast<Axes>(255), [&](Axes a) {
    if (axis_size(*this, a) > 1)
      text += (text.empty() ? "" : " ") + std::string(axis_name(a)) + "=" +
              std::to_string(axis_size(*this, a));
  });
  if (text.empty()) return "one rank";
  if (ranks_per_node > 0 && ranks_per_node < num_ranks())
    text += " ranks_per_node=" + std::to_string(ranks_per_node);
  return text;
}

std::vector<MeshShape> all_mesh_shapes(int num_ranks) {
  std::vector<MeshShape> all;
  for (int replicate : divisors(num_ranks))
    for (int shard : divisors(num_ranks / replicate))
      for (int context : divisors(num_ranks / replicate / shard)) {
        const int block = num_ranks / replicate;
        for (int experts : divisors(block))
          for (int tensor : divisors(block / experts))
            all.push_back(MeshShape{.dp_replicate = replicate,
                                    .dp_shard = shard,
                                    .cp = context,
                                    .tp = block / shard / context,
                                    .ep = experts,
                                    .etp = tensor}
                              .validated(num_ranks));
      }
  return all;
}

MeshShape on_nodes_in_turn(MeshShape shape, std::size_t turn) {
  if (turn % 2 != 0) return shape;
  for (const int ranks : turn % 4 == 0 ? std::array{2, 4} : std::array{4, 2}) {
    shape.ranks_per_node = ranks;
    if (shape.num_nodes_of_ep() > 1) return shape;
  }
  shape.ranks_per_node = 0;
  return shape;
}

std::string to_string(Axes set) {
  std::string text;
  each_axis(set, [&](Axes a) { text += (text.empty() ? "" : "|") + std::string(axis_name(a)); });
  return text.empty() ? "none" : text;
}

namespace {
// The nodes that all processes name: 0 where they do not agree.
MeshShape with_agreed_nodes(MeshShape shape, comm::Group& world) {
  if (comm::num_launched_processes() == 0 || world.size() == 1) return shape;
  const std::int64_t mine = shape.ranks_per_node;
  const at::Tensor least = world.all_reduce(
      at::tensor({mine, -mine}, at::kLong).to(world.control_device()), comm::ReduceOp::min);
  const at::Tensor found = least.cpu();
  if (found[0].item<std::int64_t>() != -found[1].item<std::int64_t>()) shape.ranks_per_node = 0;
  return shape;
}
}  // namespace

template <class F>
void Mesh::make_groups(F make) {
  for (Axes used : kUsed) {
    const Axes set = canonical(used);
    if (set != none && !groups_.contains(set)) groups_[set] = make(set);
  }
}

Mesh::Mesh(comm::Group& world, const MeshShape& shape)
    : shape_(with_agreed_nodes(shape.validated(world.size()), world)),
      rank_(world.rank()),
      solo_(comm::solo_group()) {
  // Ordered by world rank, the last axis is the fastest within a group too.
  make_groups([&](Axes set) {
    return world.split(shape_.group_number(rank_, set), rank_, to_string(set));
  });
}

Mesh::Mesh(const MeshShape& shape, int rank, const MakeGroup& make)
    : shape_(shape.validated()), rank_(rank), solo_(comm::solo_group()) {
  MOESH_CHECK(rank >= 0 && rank < shape_.num_ranks(), "rank ", rank, " of a mesh of ",
              shape_.num_ranks());
  make_groups([&](Axes set) {
    std::vector<int> members;
    for (int r = 0; r < shape_.num_ranks(); ++r)
      if (shape_.group_number(r, set) == shape_.group_number(rank, set)) members.push_back(r);
    return make(to_string(set), shape_.coordinate(rank, set), members);
  });
}

int Mesh::coordinate(Axes set) const { return shape_.coordinate(rank_, set); }

Axes Mesh::canonical(Axes set) const {
  Axes large = none;
  each_axis(set, [&](Axes a) {
    if (axis_size(shape_, a) > 1) large = large | a;
  });
  // Where ep is all on one node, or has one rank on each, half of it is all of it.
  for (Axes half : {ep_nodes, ep_inside})
    if (contains(large, half) && axis_size(shape_, half) == shape_.ep)
      large = without(large, half) | ep;
  return large;
}

const std::shared_ptr<comm::Group>& Mesh::group(Axes set) const {
  MOESH_CHECK((set & kDenseOnly) == none || (set & kSparseOnly) == none, ErrorKind::config,
              "mesh: the axes ", to_string(set),
              " belong to different views; a group takes axes of one");
  const Axes large = canonical(set);
  if (large == none) return solo_;
  const auto found = groups_.find(large);
  MOESH_CHECK(found != groups_.end(), ErrorKind::config, "mesh: no group was split for the axes ",
              to_string(set), "; the products in use are listed in mesh.cpp (kUsed): add it there");
  return found->second;
}

MeshScope::MeshScope(const Mesh& mesh)
    : scope_(scoped_mesh, &mesh),
      other_threads_(c10::AutogradState::get_tls_state().get_multithreading_enabled()) {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
}

MeshScope::~MeshScope() {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(other_threads_);
}

const Mesh& current_mesh() {
  MOESH_CHECK(
      scoped_mesh, ErrorKind::config,
      "this thread has no mesh: make one at the start of the rank's function, Mesh mesh(world, {.tp = 2}); MeshScope scope(mesh);");
  return *scoped_mesh;
}

}  // namespace moesh
