#include "moesh/fsdp/param.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "moesh/base/error.h"
#include "moesh/base/random.h"
#include "moesh/fsdp/device_random.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/fsdp/reduce.h"
#include "moesh/types/token.h"
#include "tests/comm/trace.h"
#include "tests/spmd/device.h"
#include "tests/spmd/on_mesh.h"
#include "tests/types/places.h"

namespace moesh {
namespace {

using enum Place;

const Init kNormal{.kind = Init::Distribution::normal, .scale = 0.5, .seed = 42};

at::Tensor slice(at::Tensor x, const Region& r) {
  for (size_t d = 0; d < r.start.size(); ++d)
    x = x.narrow(static_cast<std::int64_t>(d), r.start[d], r.length[d]);
  return x;
}

// Odd sizes: nothing divides.
ParamSpec dense_spec() {
  return {.name = "w",
          .shape = {7, 5},
          .cuts = {{tp, 1}},
          .dtype = at::kDouble,
          .device = test_device()};
}
ParamSpec expert_spec() {
  return {.name = "experts",
          .shape = {5, 7, 3},
          .cuts = {{ep, 0}, {etp, 1}},
          .dtype = at::kDouble,
          .device = test_device()};
}
ParamSpec norm_spec() {
  return {.name = "norm", .shape = {7}, .dtype = at::kDouble, .device = test_device()};
}

TEST(Param, InitialValuesDoNotDependOnTheMesh) {
  at::Tensor w, experts, norm;
  on_mesh({}, [&](const Mesh&) {
    w = Param<Dense{I, I, F}>(dense_spec(), kNormal).stored().value.detach();
    experts = Param<Sparse{I, E, F}>(expert_spec(), kNormal).stored().value.detach();
    norm = Param<Dense{I, I, I}>(norm_spec(),
                                 {.kind = Init::Distribution::uniform, .scale = 2, .seed = 1})
               .stored()
               .value.detach();
  });
  EXPECT_GT(w.std().item<double>(), 0.3);
  EXPECT_LE(norm.abs().max().item<double>(), 2);
  std::vector<MeshShape> shapes = all_mesh_shapes(8);
  for (int n : {2, 3, 4, 6})
    for (const auto& s : all_mesh_shapes(n)) shapes.push_back(s);
  for (const auto& shape : shapes) {
    on_mesh(shape, [&](const Mesh& mesh) {
      const Param<Dense{I, I, F}> a(dense_spec(), kNormal);
      const Param<Sparse{I, E, F}> b(expert_spec(), kNormal);
      const Param<Dense{I, I, I}> c(norm_spec(),
                                    {.kind = Init::Distribution::uniform, .scale = 2, .seed = 1});
      EXPECT_TRUE(at::equal(a.stored().value.detach(), slice(w, a.stored().shard)))
          << mesh.shape().describe();
      EXPECT_TRUE(at::equal(b.stored().value.detach(), slice(experts, b.stored().shard)))
          << mesh.shape().describe();
      EXPECT_TRUE(at::equal(c.stored().value.detach(), slice(norm, c.stored().shard)))
          << mesh.shape().describe();
      EXPECT_TRUE(at::equal(local(value(a)), slice(w, a.stored().compute)))
          << mesh.shape().describe();
      EXPECT_TRUE(at::equal(local(value(b)), slice(experts, b.stored().compute)))
          << mesh.shape().describe();
      EXPECT_TRUE(at::equal(local(value(c)), norm)) << mesh.shape().describe();
    });
  }
}

// Rank r multiplies what `use` gives with its own random weights; the gradient is the sum of these
// over every rank that holds the same slice, whatever the mesh, and is the same on all of them.
template <auto L>
void check_gradient(const Mesh& mesh, const ParamSpec& spec) {
  const Param<L> w(spec, kNormal);
  const auto compute = use(w);
  static_assert(axes_with(decltype(compute)::layout, I) == none,
                "nothing stays invariant in split work");
  EXPECT_TRUE(at::equal(local(compute).detach(), local(value(w))));
  const auto weights_of = [&](int rank) {
    at::Tensor v = at::empty(spec.shape, at::kDouble);
    for (std::int64_t i = 0; i < v.numel(); ++i)
      v.data_ptr<double>()[i] =
          Random(5, static_cast<std::uint64_t>(rank)).normal(static_cast<std::uint64_t>(i));
    return v.to(test_device());
  };
  const auto& region = w.stored().compute;
  (local(compute) * slice(weights_of(mesh.rank()), region)).sum().backward();

  at::Tensor expected = at::zeros(spec.shape, at::TensorOptions(at::kDouble).device(test_device()));
  constexpr Axes cutting = Param<L>::cutting_axes;
  for (int r = 0; r < mesh.shape().num_ranks(); ++r)
    if (mesh.coordinate(r, cutting) == mesh.coordinate(cutting)) expected += weights_of(r);
  const at::Tensor gradient = local(grad(w));
  EXPECT_TRUE(at::allclose(gradient, slice(expected, region), 1e-12, 1e-12))
      << spec.name << " on " << mesh.shape().describe();
}

TEST(Param, GradientIsTheSumOverAllRanksThatUseTheSlice) {
  for (int n : {1, 2, 3, 4, 8})
    for (const auto& shape : all_mesh_shapes(n))
      on_mesh(shape, [](const Mesh& mesh) {
        check_gradient<Dense{I, I, F}>(mesh, dense_spec());
        check_gradient<Dense{I, I, I}>(mesh, norm_spec());
        check_gradient<Sparse{I, E, F}>(mesh, expert_spec());
        ParamSpec bias{.name = "bias",
                       .shape = {5, 2},
                       .cuts = {{ep, 0}},
                       .storage_dim = 1,
                       .dtype = at::kDouble,
                       .device = test_device()};
        check_gradient<Sparse{I, E, I}>(mesh, bias);
      });
}

TEST(Param, BackwardIsOneReduceScatterAndOneAllReduce) {
  on_mesh({.dp_replicate = 2, .dp_shard = 2, .tp = 2}, [](const Mesh& mesh) {
    const Param<Dense{I, I, I}> w(norm_spec(), kNormal);
    const comm::Trace forward;
    const auto x = use(w);
    ASSERT_EQ(forward.entries().size(), 1u);
    EXPECT_EQ(forward.entries()[0].group, "dp_shard");
    EXPECT_EQ(forward.entries()[0].op, comm::Collective::all_gather);
    const comm::Trace backward;
    local(x).sum().backward();
    ASSERT_EQ(backward.entries().size(), 2u);
    EXPECT_EQ(backward.entries()[0].group, "dp_shard");
    EXPECT_EQ(backward.entries()[0].op, comm::Collective::reduce_scatter);
    EXPECT_EQ(backward.entries()[1].group, "dp_replicate|tp");
    EXPECT_EQ(backward.entries()[1].op, comm::Collective::all_reduce);
    EXPECT_EQ(backward.entries()[1].bytes, (mesh.coordinate(dp_shard) == 0 ? 4 : 3) * 8)
        << "the small shard: 4 or 3 of 7 rows";
  });
}

// bfloat16 compute, float32 master weights: 256 + 1 is lost in bfloat16, and must not be lost in
// the reduction.
// What is not trained is gathered like all others, and ends there: it has no gradient that a rank
// would have to sum. Gradients of what it is multiplied with go on.
TEST(Param, WhatIsNotTrainedIsGatheredAndHasNoGradient) {
  ParamSpec spec = dense_spec();
  spec.dtype = at::kFloat, spec.compute = at::kBFloat16, spec.trained = false;
  on_mesh({.dp_replicate = 2, .dp_shard = 2, .tp = 2}, [&](const Mesh&) {
    const Param<Dense{I, I, F}> w(spec, kNormal);
    ParamSpec of_trained = spec;
    of_trained.trained = true;
    const Param<Dense{I, I, F}> trained(of_trained, kNormal);
    EXPECT_FALSE(w.stored().value.requires_grad());
    EXPECT_EQ(w.stored().value.scalar_type(), at::kBFloat16);
    const auto x = as_leaf(assume<Dense{T, T, R}>(
        at::ones({3, w.stored().compute.length[1]}, use(w).local().options())));
    EXPECT_TRUE(use(w).local().equal(use(trained).local().detach())) << "the same numbers";
    const comm::Trace trace;
    const auto y = linear(x, use(w));
    EXPECT_TRUE(y.local().requires_grad());
    y.local().sum().backward();
    ASSERT_TRUE(x.local().grad().defined());
    EXPECT_TRUE(
        at::allclose(x.local().grad(), use(w).local().sum(0).expand_as(x.local()), 0.02, 0.05));
    EXPECT_FALSE(w.stored().value.grad().defined());
    for (const auto& e : trace.entries()) EXPECT_EQ(e.op, comm::Collective::all_gather);
  });
}

TEST(Param, ReductionIsInThePrecisionOfTheMasterWeights) {
  on_mesh({.dp_replicate = 2, .dp_shard = 2}, [](const Mesh& mesh) {
    ParamSpec spec = norm_spec();
    spec.dtype = at::kFloat;
    spec.compute = at::kBFloat16;
    const Param<Dense{I, I, I}> w(spec, kNormal);
    const auto x = use(w);
    EXPECT_EQ(local(x).scalar_type(), at::kBFloat16);
    EXPECT_EQ(w.stored().value.scalar_type(), at::kFloat);
    (local(x) * (mesh.rank() == 0 ? 256.0 : 1.0)).sum().backward();
    EXPECT_EQ(w.stored().value.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(local(grad(w)), at::full({7}, 259.0, local(grad(w)).options())));
  });
}

TEST(Param, StayKeepsAnAxisInvariant) {
  on_mesh({.tp = 2}, [](const Mesh&) {
    const Param<Dense{I, I, I}> w(norm_spec(), kNormal);
    const auto x = use<tp>(w);
    static_assert(decltype(x)::layout == Dense{R, R, I});
    local(x).sum().backward();  // the same work on both ranks: nothing to sum
    EXPECT_TRUE(at::equal(local(grad(w)), at::ones_like(local(grad(w)))));
  });
}

TEST(Param, CheckedFindsAValueThatDiffersAndNamesIt) {
  auto options = test_options();
  options.checked = true;
  try {
    on_mesh(
        {.tp = 2},
        [](const Mesh& mesh) {
          Param<Dense{I, I, I}> w(norm_spec(), kNormal);
          const at::NoGradGuard no_grad;
          if (mesh.rank() == 1) w.stored().value[3] += 1e-9;
          use(w);
        },
        options);
    FAIL() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_NE(
        std::string(e.what()).find("'norm' is promised to be the same on every rank of group 'tp'"),
        std::string::npos)
        << e.what();
  }
}

// A norm on a stream that is the same on all tp ranks (I) does the same work on all of them: they
// must have the same weight, and find the same gradient.
TEST(Param, CheckedComparesWhatRanksDoTheSameWorkWith) {
  auto options = test_options();
  options.checked = true;
  const auto message = [&](auto f) {
    try {
      on_mesh({.dp_replicate = 2, .tp = 2}, f, options);
      return std::string("nothing was thrown");
    } catch (const Error& e) {
      return std::string(e.what());
    }
  };
  const auto weight = message([](const Mesh& mesh) {
    Param<Dense{I, I, I}> w(norm_spec(), kNormal);
    const at::NoGradGuard no_grad;
    if (mesh.coordinate(tp) == 1) w.stored().value[3] += 1e-9;  // the same on dp_replicate
    use<tp>(w);
  });
  EXPECT_NE(weight.find("'norm' is promised to be the same"), std::string::npos) << weight;
  const auto gradient = message([](const Mesh& mesh) {
    const Param<Dense{I, I, I}> w(norm_spec(), kNormal);
    const auto x = use<tp>(w);
    raw::run_backward([&] { (local(x) * (1.0 + mesh.coordinate(tp))).sum().backward(); });
  });
  EXPECT_NE(gradient.find("'d(norm)' is promised to be the same"), std::string::npos) << gradient;
  const auto later = message([](const Mesh& mesh) {
    const Param<Dense{I, I, I}> w(norm_spec(), kNormal);
    StepState reductions(true);
    const auto x = use<tp>(w);
    raw::run_backward([&] { (local(x) * (1.0 + mesh.coordinate(tp))).sum().backward(); });
    reductions.finish_sums();
  });
  EXPECT_NE(later.find("'d(norm)' is promised to be the same"), std::string::npos) << later;
}

TEST(Param, CheckedFindsAResidualThatDiffers) {
  auto options = test_options();
  options.checked = true;
  const auto message = [&](auto f) {
    try {
      on_mesh({.tp = 2}, f, options);
      return std::string("nothing was thrown");
    } catch (const Error& e) {
      return std::string(e.what());
    }
  };
  const auto entering = message([](const Mesh& mesh) {
    enter<tp>(assume<Dense{T, T, I}>(at::full({2}, double(mesh.rank()))));
  });
  EXPECT_NE(entering.find("'input of enter on tp'"), std::string::npos) << entering;
  const auto taken = message([](const Mesh& mesh) {
    once<tp>(assume<Dense{T, T, I}>(at::full({2}, double(mesh.rank()))));
  });
  EXPECT_NE(taken.find("'input of once on tp'"), std::string::npos) << taken;
  // A gradient that should be the same (I) and is not: something behind it forgot a reduction.
  const auto backward_of = message([](const Mesh& mesh) {
    const auto x = as_leaf(assume<Dense{T, T, P}>(at::ones({2})));
    const auto y = all_reduce<tp, I>(x);
    raw::run_backward([&] { local(y).backward(at::full({2}, double(mesh.rank()))); });
  });
  EXPECT_NE(backward_of.find("'gradient of all_reduce on tp'"), std::string::npos) << backward_of;
}

TEST(ParamErrors, NameTheParameterAndTheCure) {
  const auto message = [](const ParamSpec& spec) {
    std::string text = "nothing was thrown";
    on_mesh({}, [&](const Mesh&) {
      try {
        Param<Dense{I, I, F}> w(spec, kNormal);
      } catch (const Error& e) {
        text = e.what();
      }
    });
    return text;
  };
  EXPECT_EQ(
      message({.name = "q", .shape = {4, 4}}),
      "parameter 'q': its layout is cut on tp and .cuts names none; name the dimension of each, as in .cuts = {{tp, 0}}");
  EXPECT_EQ(
      message({.name = "q", .shape = {4}, .cuts = {{tp, 1}}}),
      "parameter 'q' is cut on tp along dimension 1: its layout is cut on tp and it has 1 dimensions");
  EXPECT_EQ(message({.name = "", .shape = {4}, .cuts = {{tp, 0}}}),
            "a parameter has no name; its name is the stream of its random numbers");
  on_mesh({}, [](const Mesh&) {
    const Param<Dense{I, I, I}> w(norm_spec(), kNormal);
    EXPECT_THROW(grad(w), Error);
  });
}

// Element i is number i of the stream that has the parameter's name; large enough for threads whose
// shares end within a row.
TEST(Param, InitialValuesAreTheStreamOfItsName) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const int before = at::get_num_threads();
  at::set_num_threads(3);
  const ParamSpec spec{.name = "w", .shape = {5, 61, 257}, .dtype = at::kDouble};
  const Random random(42, "w");
  std::vector<double> normals(3 * 100 * 257);
  random.normals(0, normals);
  using Uncut = Param<Dense{I, I, I}>;
  const at::Tensor normal =
      local(value(Uncut(spec, {.kind = Init::Distribution::normal, .scale = 0.5, .seed = 42})))
          .flatten();
  const at::Tensor uniform =
      local(value(Uncut(spec, {.kind = Init::Distribution::uniform, .scale = 0.5, .seed = 42})))
          .flatten();
  at::set_num_threads(before);
  const auto *n = normal.const_data_ptr<double>(), *u = uniform.const_data_ptr<double>();
  for (size_t i = 0; i < normals.size(); ++i) {
    ASSERT_EQ(n[i], 0.5 * normals[i]) << i;
    ASSERT_EQ(u[i], 0.5 * (2 * random.uniform(i) - 1)) << i;
  }
}

// The same where a rank has a part of every row, and threads whose shares end within it.
TEST(Param, AShardHasTheInitialValuesOfTheWhole) {
  const ParamSpec whole{.name = "w", .shape = {401, 514}, .dtype = at::kDouble};
  const Random random(42, "w");
  on_mesh({.tp = 2}, [&](const Mesh& mesh) {
    at::set_num_threads(3);
    ParamSpec spec = whole;
    spec.cuts = {{tp, 1}};
    const Param<Dense{I, I, F}> w(spec,
                                  {.kind = Init::Distribution::uniform, .scale = 0.5, .seed = 42});
    const at::Tensor mine = local(value(w)).contiguous();
    const auto* x = mine.const_data_ptr<double>();
    for (std::int64_t i = 0; i < mine.numel(); ++i) {
      const auto index = static_cast<std::uint64_t>(i / 257 * 514 + mesh.rank() * 257 + i % 257);
      ASSERT_EQ(x[i], 0.5 * (2 * random.uniform(index) - 1)) << i;
    }
  });
}

// What a device makes by LibTorch's operations, here on any device, is what the host makes.
TEST(DeviceRandom, HasTheNumbersOfTheHost) {
  for (const auto& [seed, name] :
       {std::pair<std::uint64_t, const char*>{0, "w"}, {0xFEDCBA9876543210, "model.layers.3"}}) {
    const Random random(seed, name);
    std::vector<std::int64_t> indices{
        0, 1, 2, 7, 1000, (std::int64_t{1} << 33) + 5, (std::int64_t{1} << 62) + 12345};
    const at::Tensor index = at::tensor(indices, at::kLong).to(test_device());
    const at::Tensor uniform = raw::uniforms(random, index).cpu(),
                     normal = raw::normals(random, index).cpu();
    for (std::size_t i = 0; i < indices.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      const auto number = static_cast<std::uint64_t>(indices[i]);
      EXPECT_EQ(uniform[at].item<double>(), random.uniform(number)) << indices[i];
      EXPECT_NEAR(normal[at].item<double>(), random.normal(number), 1e-14) << indices[i];
    }
  }
}

TEST(DeviceRandom, FillsABoxOfATensor) {
  for (const std::int64_t columns : {10, 9})
    for (const auto kind :
         {Init::Distribution::normal, Init::Distribution::uniform, Init::Distribution::ones})
      for (const std::int64_t first : {0, 1, 4})  // lines that begin at a pair, and within one
        for (const std::int64_t width : {1, 4, 5}) {
          const Init init{.kind = kind, .scale = 0.3, .seed = 9};
          const Random random(init.seed, "w");
          at::Tensor box =
              at::empty({2, 2, width}, at::TensorOptions(test_device()).dtype(at::kDouble));
          raw::fill_on_device(box, {4, 6, columns}, {1, 4, first}, init, random, /*chunk=*/6);
          box = box.cpu();
          for (std::int64_t i = 0; i < box.numel(); ++i) {
            const std::int64_t a = i / (2 * width) + 1, b = i / width % 2 + 4,
                               c = i % width + first;
            const auto index = static_cast<std::uint64_t>((a * 6 + b) * columns + c);
            const double expected = kind == Init::Distribution::normal ? 0.3 * random.normal(index)
                                    : kind == Init::Distribution::uniform
                                        ? 0.3 * (2 * random.uniform(index) - 1)
                                        : 0.3;
            EXPECT_NEAR(box.flatten()[i].item<double>(), expected, 1e-14) << a << b << c;
          }
        }
}

// Which layouts a parameter may have, asked at run time.
TEST(ParamLayout, IsInvariantOrCutAndNeverOverItsStorage) {
  for_each_layout<Dense>([](Dense l) {
    const auto rests = [](Place p) { return p == I || p == F || p == E; };
    const bool fine = l.dp == I && l.cp == I && rests(l.tp);
    EXPECT_EQ(refusal([&] { check_param(l); }) == "", fine) << to_string(l);
  });
  for_each_layout<Sparse>([](Sparse l) {
    const auto rests = [](Place p) { return p == I || p == F || p == E; };
    const bool fine = l.edp == I && rests(l.ep) && rests(l.etp);
    EXPECT_EQ(refusal([&] { check_param(l); }) == "", fine) << to_string(l);
  });
  const auto text = [](auto l) { return refusal([&] { check_param(l); }); };
  EXPECT_NE(text(Dense{I, I, T}).find("through use(w)"), std::string::npos);
  EXPECT_NE(text(Dense{F, I, I}).find("I on dp (edp)"), std::string::npos);
  EXPECT_NE(text(Dense{I, F, I}).find("I on cp"), std::string::npos);
}

// Enough for several threads: every index once, and all of them before it returns.
TEST(InParallel, VisitsEveryIndexOnce) {
  const int before = at::get_num_threads();
  at::set_num_threads(3);
  for (std::int64_t n : {0, 1, 65535, 65536, 65537, 100000}) {
    std::vector<std::atomic<int>> visits(static_cast<size_t>(n));
    raw::in_parallel(n, [&](std::int64_t begin, std::int64_t end) {
      ASSERT_TRUE(begin >= 0 && end <= n) << begin << " to " << end << " of " << n;
      for (std::int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
    });
    EXPECT_TRUE(std::ranges::all_of(visits, [](const auto& v) { return v == 1; })) << n;
  }
  at::set_num_threads(before);
}

}  // namespace
}  // namespace moesh
