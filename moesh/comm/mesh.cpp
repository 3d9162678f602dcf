#include "moesh/comm/mesh.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "moesh/base/error.h"

namespace moesh {
namespace {

thread_local const Mesh* scoped_mesh = nullptr;

// From slow to fast, as each view numbers the ranks.
constexpr Axes kDenseAxes[] = {pp, dp_replicate, dp_shard, cp, tp};
constexpr Axes kSparseAxes[] = {pp, dp_replicate, efsdp, ep, etp};
constexpr Axes kSparseOnly = efsdp | ep | etp;
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
                          pp};

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
    default: return 1;
  }
}

int axis_coordinate(const MeshShape& s, int rank, Axes axis) {
  const auto& order = contains(kSparseOnly, axis) ? kSparseAxes : kDenseAxes;
  for (int i = 4; i >= 0; --i) {
    if (order[i] == axis) return rank % axis_size(s, axis);
    rank /= axis_size(s, order[i]);
  }
  return 0;
}

template <class F>
void each_axis(Axes set, F f) {
  for (int bit = 1; bit < 256; bit *= 2)
    if (contains(set, static_cast<Axes>(bit))) f(static_cast<Axes>(bit));
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
  for (Axes a : is_sparse ? kSparseAxes : kDenseAxes)
    if (!contains(set, a)) number = number * axis_size(*this, a) + axis_coordinate(*this, rank, a);
  return number;
}

MeshShape MeshShape::validated() const {
  for (Axes a :
       {Axes::pp, Axes::dp_replicate, Axes::dp_shard, Axes::cp, Axes::tp, Axes::ep, Axes::etp})
    MOESH_CHECK(axis_size(*this, a) >= 1, ErrorKind::config, "mesh: ", axis_name(a), " is ",
                axis_size(*this, a), "; every axis has a size of 1 or more");
  MOESH_CHECK(efsdp >= 0, ErrorKind::config, "mesh: efsdp is ", efsdp,
              "; use 0 (what is left) or a size");
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
  return text.empty() ? "one rank" : text;
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

std::string to_string(Axes set) {
  std::string text;
  each_axis(set, [&](Axes a) { text += (text.empty() ? "" : "|") + std::string(axis_name(a)); });
  return text.empty() ? "none" : text;
}

template <class F>
void Mesh::make_groups(F make) {
  for (Axes used : kUsed) {
    const Axes set = canonical(used);
    if (set != none && !groups_.contains(set)) groups_[set] = make(set);
  }
}

Mesh::Mesh(comm::Group& world, const MeshShape& shape)
    : shape_(shape.validated(world.size())), rank_(world.rank()), solo_(comm::solo_group()) {
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

std::string Mesh::table() const {
  std::ostringstream os;
  const auto row = [&](const char* name, const auto& axes) {
    os << std::left << std::setw(8) << name;
    for (Axes a : axes) os << axis_name(a) << ' ' << axis_size(shape_, a) << "  ";
    os << '\n';
  };
  os << "mesh of " << shape_.num_ranks() << (shape_.num_ranks() == 1 ? " rank\n" : " ranks\n");
  row("dense", kDenseAxes);
  row("sparse", kSparseAxes);
  os << "rank    dense (dp cp tp)   sparse (edp ep etp)\n";
  for (int r = 0; r < shape_.num_ranks(); ++r) {
    os << std::setw(8) << r;
    for (Axes a : {dp, cp, tp}) os << std::setw(3) << coordinate(r, a);
    os << std::setw(10) << "";
    for (Axes a : {edp, ep, etp}) os << std::setw(3) << coordinate(r, a);
    os << '\n';
  }
  return os.str();
}

MeshScope::MeshScope(const Mesh& mesh) : outer_(scoped_mesh) { scoped_mesh = &mesh; }
MeshScope::~MeshScope() { scoped_mesh = outer_; }

const Mesh& current_mesh() {
  MOESH_CHECK(
      scoped_mesh, ErrorKind::config,
      "this thread has no mesh: make one at the start of the rank's function, Mesh mesh(world, {.tp = 2}); MeshScope scope(mesh);");
  return *scoped_mesh;
}

}  // namespace moesh
