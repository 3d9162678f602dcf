#include "moesh/comm/mesh.h"

#include <c10/core/AutogradState.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "moesh/base/error.h"
#include "moesh/comm/launch.h"

namespace moesh {
namespace {

// Sizes, and the coordinates of each rank in both views.
std::string table_of(const Mesh& mesh) {
  std::ostringstream os;
  const auto row = [&](const char* name, std::initializer_list<Axes> axes) {
    os << std::left << std::setw(8) << name;
    for (Axes a : axes) os << to_string(a) << ' ' << mesh.size(a) << "  ";
    os << '\n';
  };
  const int num_ranks = mesh.shape().num_ranks();
  os << "mesh of " << num_ranks << (num_ranks == 1 ? " rank\n" : " ranks\n");
  row("dense", {pp, dp_replicate, dp_shard, cp, tp});
  row("sparse", {pp, dp_replicate, efsdp, ep, etp});
  os << "rank    dense (dp cp tp)   sparse (edp ep etp)\n";
  for (int r = 0; r < num_ranks; ++r) {
    os << std::setw(8) << r;
    for (Axes a : {dp, cp, tp}) os << std::setw(3) << mesh.coordinate(r, a);
    os << std::setw(10) << "";
    for (Axes a : {edp, ep, etp}) os << std::setw(3) << mesh.coordinate(r, a);
    os << '\n';
  }
  return os.str();
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::config);
    return e.what();
  }
  return "nothing was thrown";
}

TEST(MeshShape, FillsInWhatIsLeftForTheExperts) {
  const MeshShape s = MeshShape{.dp_shard = 2, .cp = 2, .tp = 2, .ep = 2, .etp = 2}.validated();
  EXPECT_EQ(s.efsdp, 2);
  EXPECT_EQ(s.size(dp | cp), 4);
  EXPECT_EQ(s.size(efsdp | ep | etp), 8);
  EXPECT_EQ(s.describe(), "dp_shard=2 cp=2 tp=2 efsdp=2 ep=2 etp=2");
  EXPECT_EQ((MeshShape{.pp = 2, .dp_replicate = 3}.describe()), "pp=2 dp_replicate=3");
}

TEST(MeshShape, NamesSizesThatDoNotMultiplyUp) {
  EXPECT_EQ(
      error_of([] { MeshShape{.dp_shard = 2, .tp = 2, .ep = 3}.validated(); }),
      "mesh: ep * etp = 3 * 1 = 3 does not divide dp_shard * cp * tp = 2 * 1 * 2 = 4; the experts use the same ranks, so ep * etp "
      "must be one of [1, 2, 4]");
  EXPECT_EQ(
      error_of([] { MeshShape{.tp = 4, .efsdp = 3, .ep = 2}.validated(); }),
      "mesh: efsdp * ep * etp = 3 * 2 * 1 = 6, and dp_shard * cp * tp = 4; set efsdp to 2 or leave it out");
  EXPECT_EQ(
      error_of([] { MeshShape{.dp_shard = 2, .tp = 2}.validated(6); }),
      "mesh: pp * dp_replicate * dp_shard * cp * tp = 1 * 1 * 2 * 1 * 2 = 4, and the world has 6 ranks; start 4 ranks, or change a "
      "size so that the product is 6");
  EXPECT_EQ(error_of([] { MeshShape{.cp = 0}.validated(); }),
            "mesh: cp is 0; every axis has a size of 1 or more");
  EXPECT_EQ(error_of([] { current_mesh(); }).substr(0, 23), "this thread has no mesh");
}

// ep = ep_nodes x ep_inside, by the node of each rank: rank / ranks_per_node.
TEST(MeshShape, NodesShareExpertRanksEvenlyOrNotAtAll) {
  const auto nodes = [](MeshShape s, int ranks_per_node) {
    s.ranks_per_node = ranks_per_node;
    return s.validated().num_nodes_of_ep();
  };
  const MeshShape eight{.dp_shard = 8, .ep = 8}, slices{.dp_shard = 8, .ep = 4, .etp = 2};
  for (const auto& [ranks, of_eight, of_slices] :
       {std::tuple{0, 1, 1}, {1, 8, 4}, {2, 4, 4}, {3, 0, 0}, {4, 2, 2}, {8, 1, 1}, {16, 1, 1}}) {
    EXPECT_EQ(nodes(eight, ranks), of_eight) << ranks;
    EXPECT_EQ(nodes(slices, ranks), of_slices) << ranks;
  }
  EXPECT_EQ(nodes({.dp_shard = 8, .ep = 2}, 4), 1) << "both groups of a node are its own";
  EXPECT_EQ(nodes({.dp_shard = 12, .ep = 3, .etp = 4}, 6), 0) << "etp lies across";
  EXPECT_EQ(error_of([] { MeshShape{.ranks_per_node = -1}.validated(); }),
            "mesh: ranks_per_node is -1; use 0 (all ranks on one node) or a number of ranks");
  for (const MeshShape& shape : all_mesh_shapes(8))
    for (const int ranks : {1, 2, 4}) {
      MeshShape s = shape;
      s.ranks_per_node = ranks;
      if (s.num_nodes_of_ep() == 0) continue;
      EXPECT_EQ(s.size(ep_nodes) * s.size(ep_inside), s.ep);
      for (int r = 0; r < 8; ++r) {
        EXPECT_EQ(s.coordinate(r, ep_nodes) * s.size(ep_inside) + s.coordinate(r, ep_inside),
                  s.coordinate(r, ep));
        for (int other = 0; other < 8; ++other) {
          if (s.group_number(r, ep) != s.group_number(other, ep)) continue;
          // Ranks of one ep group are on the same of its nodes exactly where they share a node.
          if (ranks % s.etp == 0)
            EXPECT_EQ(s.coordinate(r, ep_nodes) == s.coordinate(other, ep_nodes),
                      s.size(ep_nodes) == 1 || r / ranks == other / ranks)
                << s.describe();
          EXPECT_EQ(s.group_number(r, ep_inside) == s.group_number(other, ep_inside),
                    s.coordinate(r, ep_nodes) == s.coordinate(other, ep_nodes));
          EXPECT_EQ(s.group_number(r, ep_nodes) == s.group_number(other, ep_nodes),
                    s.coordinate(r, ep_inside) == s.coordinate(other, ep_inside));
        }
      }
    }
}

TEST(Mesh, HalvesOfEpAreGroupsOfTheirOwnOnlyWhereBothAreLargerThanOne) {
  comm::launch(8, [](comm::Group& world) {
    const Mesh mesh(world, {.dp_shard = 8, .ep = 4, .etp = 2, .ranks_per_node = 4});
    const int r = world.rank();
    EXPECT_EQ(mesh.group(ep_nodes)->members(), (std::vector<int>{r % 4, r % 4 + 4}));
    EXPECT_EQ(mesh.group(ep_inside)->members(),
              (std::vector<int>{r / 4 * 4 + r % 2, r / 4 * 4 + r % 2 + 2}));
    EXPECT_EQ(mesh.group(ep_inside | etp)->size(), 4);
    EXPECT_EQ(mesh.group(ep_inside | etp)->rank(), r % 4);
    EXPECT_EQ(mesh.coordinate(ep_inside | etp), r % 4);
    EXPECT_EQ(mesh.group(ep_inside | etp)->name(), "ep_inside|etp");
    const Mesh one_node(world, {.dp_shard = 8, .ep = 4, .etp = 2});
    EXPECT_EQ(one_node.group(ep_inside), one_node.group(ep));
    EXPECT_EQ(one_node.group(ep_inside | etp), one_node.group(ep | etp));
    EXPECT_EQ(one_node.group(ep_nodes)->size(), 1);
    const Mesh apart(world, {.dp_shard = 8, .ep = 8, .ranks_per_node = 1});
    EXPECT_EQ(apart.group(ep_nodes), apart.group(ep));
    EXPECT_EQ(apart.group(ep_inside)->size(), 1);
  });
}

TEST(MeshShape, NamesEveryAxisThatIsEmpty) {
  const std::pair<const char*, int MeshShape::*> axes[] = {
      {"pp", &MeshShape::pp},
      {"dp_replicate", &MeshShape::dp_replicate},
      {"dp_shard", &MeshShape::dp_shard},
      {"cp", &MeshShape::cp},
      {"tp", &MeshShape::tp},
      {"ep", &MeshShape::ep},
      {"etp", &MeshShape::etp}};
  for (const auto& [name, size] : axes) {
    MeshShape shape;
    EXPECT_EQ(shape.validated().num_ranks(), 1);
    shape.*size = 0;
    EXPECT_EQ(error_of([&] { shape.validated(); }),
              "mesh: " + std::string(name) + " is 0; every axis has a size of 1 or more");
  }
}

TEST(MeshShape, ThereAre333OfUpToEightRanks) {
  size_t num = 0;
  for (int n = 1; n <= 8; ++n) num += all_mesh_shapes(n).size();
  EXPECT_EQ(num, 333u);
}

// A rank's place by the definition: both views number the ranks with the last axis fastest.
int expected_coordinate(const MeshShape& s, int rank, Axes axis) {
  const bool sparse = axis == efsdp || axis == ep || axis == etp;
  const int last = sparse ? s.etp : s.tp, middle = sparse ? s.ep : s.cp,
            first = sparse ? s.efsdp : s.dp_shard;
  if (axis == tp || axis == etp) return rank % last;
  if (axis == cp || axis == ep) return rank / last % middle;
  if (axis == dp_shard || axis == efsdp) return rank / (last * middle) % first;
  if (axis == dp_replicate) return rank / (last * middle * first) % s.dp_replicate;
  return rank / (last * middle * first * s.dp_replicate);
}

TEST(Mesh, GroupsHoldTheRanksThatDifferOnTheirAxesAlone) {
  std::vector<MeshShape> shapes = all_mesh_shapes(4);
  for (const auto& s : all_mesh_shapes(6)) shapes.push_back(s);
  shapes.push_back({.pp = 2, .dp_replicate = 2, .dp_shard = 1, .cp = 1, .tp = 2, .ep = 2});
  shapes.push_back({.dp_shard = 2, .cp = 2, .tp = 2, .ep = 2, .etp = 2});
  for (const auto& shape : shapes) {
    SCOPED_TRACE(shape.describe());
    comm::launch(shape.num_ranks(), [&](comm::Group& world) {
      const Mesh mesh(world, shape);
      const auto& s = mesh.shape();
      for (Axes set : {dp,
                       cp,
                       tp,
                       dp | cp,
                       dp | tp,
                       cp | tp,
                       dp | cp | tp,
                       fsdp,
                       dp_replicate,
                       dp_replicate | tp,
                       edp,
                       ep,
                       etp,
                       edp | ep,
                       ep | etp,
                       edp | ep | etp,
                       efsdp,
                       dp_replicate | ep,
                       dp_replicate | etp,
                       dp_replicate | ep | etp,
                       pp}) {
        const bool sparse = (set & (efsdp | ep | etp)) != none;
        std::vector<int> expected;
        for (int r = 0; r < world.size(); ++r) {
          bool member = true;
          for (Axes a :
               {pp, dp_replicate, sparse ? efsdp : dp_shard, sparse ? ep : cp, sparse ? etp : tp})
            member = member && (contains(set, a) || expected_coordinate(s, r, a) ==
                                                        expected_coordinate(s, world.rank(), a));
          if (member) expected.push_back(r);
        }
        const auto& group = *mesh.group(set);
        if (expected.size() > 1) EXPECT_EQ(group.members(), expected) << to_string(set);
        EXPECT_EQ(group.size(), static_cast<int>(expected.size())) << to_string(set);
        EXPECT_EQ(group.rank(), mesh.coordinate(set)) << to_string(set);
      }
      EXPECT_THROW(mesh.group(cp | ep), Error);
    });
  }
}

TEST(Mesh, PrintsASmallTable) {
  comm::launch(4, [](comm::Group& world) {
    const Mesh mesh(world, {.dp_shard = 2, .tp = 2, .ep = 4});
    if (world.rank() == 0)
      EXPECT_EQ(table_of(mesh),
                "mesh of 4 ranks\n"
                "dense   pp 1  dp_replicate 1  dp_shard 2  cp 1  tp 2  \n"
                "sparse  pp 1  dp_replicate 1  efsdp 1  ep 4  etp 1  \n"
                "rank    dense (dp cp tp)   sparse (edp ep etp)\n"
                "0       0  0  0            0  0  0  \n"
                "1       0  0  1            0  1  0  \n"
                "2       1  0  0            0  2  0  \n"
                "3       1  0  1            0  3  0  \n");
  });
}

// Where every axis has another coordinate.
TEST(Mesh, PrintsEachAxisInItsColumn) {
  std::vector<std::string> names;
  const auto make = [&](const std::string& name, int rank, const std::vector<int>& members) {
    names.push_back(name);
    return comm::fake_group(name, rank, members);
  };
  const Mesh mesh({.dp_shard = 2, .tp = 4, .ep = 2, .etp = 2}, 0, make);
  const std::string table = table_of(mesh);
  for (const char* row :
       {"1       0  0  1            0  0  1  \n", "2       0  0  2            0  1  0  \n",
        "6       1  0  2            1  1  0  \n"})
    EXPECT_NE(table.find(row), std::string::npos) << table;
  std::ranges::sort(names);
  EXPECT_EQ(std::ranges::adjacent_find(names), names.end()) << "a group is made once";
  names.clear();
  EXPECT_TRUE(table_of(Mesh({}, 0, make)).starts_with("mesh of 1 rank\n"));
  EXPECT_TRUE(names.empty()) << "one rank needs no groups";
}

TEST(Mesh, ScopesNest) {
  comm::launch(1, [](comm::Group& world) {
    const Mesh outer(world, {}), inner(world, {});
    const MeshScope a(outer);
    {
      const MeshScope b(inner);
      EXPECT_EQ(&current_mesh(), &inner);
    }
    EXPECT_EQ(&current_mesh(), &outer);
  });
}

// On a GPU autograd would otherwise run backward on a thread that has no mesh.
TEST(Mesh, BackwardStaysOnTheThreadOfAScope) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const auto others = [] {
    return c10::AutogradState::get_tls_state().get_multithreading_enabled();
  };
  ASSERT_TRUE(others());
  {
    const MeshScope a(mesh);
    EXPECT_FALSE(others());
    {
      const MeshScope b(mesh);
    }
    EXPECT_FALSE(others());
  }
  EXPECT_TRUE(others());
}

TEST(Mesh, OfOneRankAloneHasTheGroupsOfTheRealOne) {
  for (const auto& shape : all_mesh_shapes(8))
    comm::launch(8, [&](comm::Group& world) {
      const Mesh real(world, shape);
      const Mesh alone(shape, world.rank(), comm::fake_group);
      for (Axes set :
           {dp, cp, tp, dp | cp | tp, fsdp, ep, etp, ep | etp, efsdp, dp_replicate | ep | etp}) {
        const auto &a = *alone.group(set), &b = *real.group(set);
        EXPECT_EQ(a.rank(), b.rank()) << shape.describe() << " " << to_string(set);
        if (b.size() > 1)
          EXPECT_EQ(a.members(), b.members()) << shape.describe() << " " << to_string(set);
        EXPECT_EQ(a.size(), b.size()) << shape.describe() << " " << to_string(set);
      }
    });
}

}  // namespace
}  // namespace moesh
