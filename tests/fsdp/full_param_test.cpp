#include "tests/fsdp/full_param.h"

#include <gtest/gtest.h>

#include <map>

#include "moesh/fsdp/fsdp.h"
#include "tests/spmd/device.h"
#include "tests/spmd/on_mesh.h"
#include "tests/support.h"

namespace moesh {
namespace {

using enum Place;

// Sizes that nothing divides. The last one is cut twice along one dimension.
template <class Fn>
void each_param(Fn f) {
  const Init init{.kind = Init::Distribution::normal, .seed = 3};
  const auto spec = [](const char* name, std::vector<std::int64_t> shape,
                       std::vector<std::pair<Axes, std::int64_t>> cuts, std::int64_t storage_dim) {
    return ParamSpec{.name = name,
                     .shape = std::move(shape),
                     .cuts = std::move(cuts),
                     .storage_dim = storage_dim,
                     .device = test_device()};
  };
  f(Param<Dense{I, I, I}>(spec("norm", {7}, {}, 0), init).stored());
  f(Param<Dense{I, I, F}>(spec("column", {7, 5}, {{tp, 0}}, 0), init).stored());
  f(Param<Dense{I, I, F}>(spec("row", {7, 5}, {{tp, 1}}, 0), init).stored());
  f(Param<Sparse{I, E, F}>(spec("experts", {5, 7, 3}, {{ep, 0}, {etp, 1}}, 2), init).stored());
  f(Param<Sparse{I, E, F}>(spec("twice", {11, 2}, {{ep, 0}, {etp, 0}}, 0), init).stored());
}

std::map<std::string, at::Tensor> full_values() {
  std::map<std::string, at::Tensor> all;
  on_mesh({}, [&] { each_param([&](const Stored& w) { all[w.spec.name] = w.value.detach(); }); });
  return all;
}

at::Tensor slice(at::Tensor x, std::size_t dim, const Region& r) {
  return x.narrow(static_cast<std::int64_t>(dim), r.start[dim], r.length[dim]);
}

TEST(FullParam, IsThatOfOneRankOnEveryMeshAndGoesBack) {
  const auto expected = full_values();
  for (int n = 1; n <= 8; ++n)
    for (const auto& shape : all_mesh_shapes(n))
      on_mesh(shape, [&] {
        each_param([&](const Stored& w) {
          const at::Tensor shard = w.value.detach(), full = gather_full(w, shard);
          EXPECT_TRUE(at::equal(full, expected.at(w.spec.name)))
              << w.spec.name << " on " << shape.describe();
          EXPECT_TRUE(at::equal(shard_of(w, full), shard))
              << w.spec.name << " on " << shape.describe();
        });
      });
}

// Axes that are left out keep their slices.
TEST(FullParam, JoinsTheAxesThatAreAskedFor) {
  const auto expected = full_values();
  for (int n : {2, 4, 6, 8})
    for (const auto& shape : all_mesh_shapes(n))
      on_mesh(shape, [&] {
        each_param([&](const Stored& w) {
          if (w.spec.name == "column") {
            EXPECT_TRUE(at::equal(gather_full(w, w.value.detach(), none),
                                  slice(expected.at("column"), 0, w.compute)));
          } else if (w.spec.name == "experts") {
            for (const auto& [axis, kept] : {std::pair<Axes, std::size_t>{etp, 0}, {ep, 1}}) {
              const at::Tensor joined = gather_full(w, w.value.detach(), axis);
              EXPECT_TRUE(at::equal(joined, slice(expected.at("experts"), kept, w.compute)))
                  << to_string(axis) << " on " << shape.describe();
              EXPECT_TRUE(at::equal(shard_of(w, joined, axis), w.value.detach()))
                  << to_string(axis) << " on " << shape.describe();
            }
          }
        });
      });
}

TEST(FullParam, RefusesWhatCannotBeJoined) {
  on_mesh({.tp = 2, .ep = 2}, [] {
    each_param([](const Stored& w) {
      const auto refusal = [&](Axes axes) {
        return error_of([&] { shard_of(w, w.value.detach(), axes); }, ErrorKind::config);
      };
      if (w.spec.name == "norm") {
        expect_parts(refusal(tp), {"'norm'", "joined over tp", "cut on none"});
        expect_parts(
            error_of([&] { shard_of(w, w.value.detach().narrow(0, 0, 1)); }, ErrorKind::config),
            {"'norm'", "[1]", "[7]"});
      } else if (w.spec.name == "twice") {
        expect_parts(refusal(ep), {"'twice'", "dimension 0", "cut on etp last", "join both"});
      }
    });
  });
}

}  // namespace
}  // namespace moesh
