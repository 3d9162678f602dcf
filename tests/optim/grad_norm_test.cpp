#include "moesh/optim/params.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "moesh/optim/optimizer.h"
#include "moesh/optim/rules.h"
#include "moesh/spmd/ops.h"
#include "tests/comm/trace.h"
#include "tests/optim/support.h"
#include "tests/optim/take_step.h"

namespace moesh::optim {
namespace {

// Whether every gradient on every rank is: if not, all ranks skip the step.
bool all_finite(const ParamList& params) { return std::isfinite(number(grad_norm(params))); }

// From the whole gradients, with no mesh at all.
double expected_norm() {
  double sum = 0;
  on_mesh({}, [&](const Mesh&) {
    Model().each_param([&](auto& p) {
      const at::Tensor g = whole_gradient(p.stored().spec, 0).cpu();
      for (std::int64_t i = 0; i < g.numel(); ++i)
        sum += g.data_ptr<double>()[i] * g.data_ptr<double>()[i];
    });
  });
  return std::sqrt(sum);
}

TEST(GradNorm, IsThatOfOneRankOnEveryMesh) {
  const double expected = expected_norm();
  int num_empty = 0;
  for (const auto& shape : meshes()) {
    std::vector<double> norms(static_cast<std::size_t>(shape.num_ranks()));
    std::vector<int> is_empty(norms.size());
    on_mesh(shape, [&](const Mesh& mesh) {
      Model model;
      model.set_gradients();
      const Norm norm = grad_norm(model.list());
      EXPECT_EQ(local(norm).scalar_type(), at::kDouble);
      norms[static_cast<std::size_t>(mesh.rank())] = number(norm);
      is_empty[static_cast<std::size_t>(mesh.rank())] = model.experts.stored().value.numel() == 0;
    });
    EXPECT_NEAR(norms[0], expected, 1e-12 * expected) << shape.describe();
    for (double norm : norms) EXPECT_EQ(norm, norms[0]) << shape.describe();
    for (int e : is_empty) num_empty += e;
  }
  EXPECT_GT(num_empty, 0) << "some rank should store no expert";
}

TEST(GradNorm, IsOneAllReduceOfOneNumber) {
  on_mesh({.dp_replicate = 2, .dp_shard = 2, .tp = 2, .ep = 2}, [](const Mesh&) {
    Model model;
    model.set_gradients();
    const comm::Trace trace;
    grad_norm(model.list());
    ASSERT_EQ(trace.entries().size(), 1u);
    EXPECT_EQ(trace.entries()[0].op, comm::Collective::all_reduce);
    EXPECT_EQ(trace.entries()[0].bytes, 8);
  });
}

// Ranks that should hold the same gradient and differ in the last bits must not take different
// decisions.
TEST(GradNorm, IsTheSameOnAllRanksWhereReplicasDrift) {
  const MeshShape shape{.dp_replicate = 2, .tp = 4, .ep = 2, .etp = 2};
  std::vector<double> norms(8);
  on_mesh(shape, [&](const Mesh& mesh) {
    Model model;
    model.set_gradients();
    model.each_param(
        [&](auto& p) { p.stored().value.mutable_grad().mul_(1 + 1e-9 * mesh.rank()); });
    norms[static_cast<std::size_t>(mesh.rank())] = number(grad_norm(model.list()));
  });
  for (double norm : norms) EXPECT_EQ(norm, norms[0]);
}

TEST(GradNorm, SumsOverPipelineStages) {
  double first = 0, second = 0;
  on_mesh({}, [&](const Mesh&) {
    Model model;
    model.set_gradients(0);
    first = number(grad_norm(model.list()));
    model.set_gradients(1);
    second = number(grad_norm(model.list()));
  });
  on_mesh({.pp = 2, .dp_shard = 2, .tp = 2, .ep = 2}, [&](const Mesh& mesh) {
    Model model;
    model.set_gradients(mesh.coordinate(pp));
    EXPECT_NEAR(number(grad_norm(model.list())), std::hypot(first, second),
                1e-12 * (first + second));
  });
}

// float32 squares would overflow, a float32 sum would lose the ones beside 2^26. More elements than
// one chunk.
TEST(GradNorm, AccumulatesInFloat64) {
  on_mesh({.dp_shard = 2}, [](const Mesh&) {
    const std::int64_t n = (std::int64_t{1} << 21) + 3;
    Param<Dense{I, I, I}> w({.name = "w", .shape = {n}, .device = test_device()});
    ParamList list;
    list.add(w);
    auto& s = w.stored();
    at::Tensor g = at::ones_like(s.value.detach());
    if (s.shard.start[0] == 0) g[0] = 8192.0;
    s.value.mutable_grad() = g;
    const double expected = std::sqrt(8192.0 * 8192.0 + static_cast<double>(n - 1));
    EXPECT_NEAR(number(grad_norm(list)), expected, 1e-12 * expected);
    g.fill_(1e30f);
    const double large = static_cast<double>(1e30f) * std::sqrt(static_cast<double>(n));
    EXPECT_NEAR(number(grad_norm(list)), large, 1e-12 * large);
    EXPECT_TRUE(all_finite(list));
  });
}

TEST(GradNorm, ReadsAGradientThatIsNotContiguous) {
  on_mesh({}, [](const Mesh&) {
    Model model;
    model.set_gradients();
    const double expected = number(grad_norm(model.list()));
    auto& g = model.w.stored().value.mutable_grad();
    g = g.t().contiguous().t();
    EXPECT_FALSE(g.is_contiguous());
    EXPECT_NEAR(number(grad_norm(model.list())), expected, 1e-12 * expected);
  });
}

// A value that is not finite in one element, on one rank, in any parameter, is seen by all: also
// where others hold the same part.
TEST(AllFinite, SeesOneElementOfOneRankOnAllRanks) {
  const double bad[] = {std::numeric_limits<double>::quiet_NaN(),
                        std::numeric_limits<double>::infinity(),
                        -std::numeric_limits<double>::infinity()};
  std::vector<MeshShape> shapes = all_mesh_shapes(4);
  for (const auto& shape :
       {MeshShape{}, MeshShape{.dp_replicate = 2, .dp_shard = 2, .tp = 2, .ep = 2},
        MeshShape{.dp_replicate = 2, .tp = 4, .ep = 2, .etp = 2}, MeshShape{.dp_shard = 8, .ep = 8},
        MeshShape{.cp = 2, .tp = 4, .etp = 4}, MeshShape{.pp = 2, .tp = 2, .ep = 2}})
    shapes.push_back(shape);
  for (const auto& shape : shapes)
    on_mesh(shape, [&](const Mesh& mesh) {
      Model model;
      int which = 0;
      for (int rank = 0; rank < mesh.shape().num_ranks(); ++rank)
        for (std::size_t p = 0; p < model.list().size(); ++p) {
          model.set_gradients();
          const ParamList list = model.list();
          EXPECT_TRUE(all_finite(list));
          // Only ranks that store something can spoil it; all know which do.
          at::Tensor& g = list[p].stored->value.mutable_grad();
          const bool spoils = mesh.rank() == rank && g.numel() > 0;
          if (spoils) g.view({-1})[-1] = bad[which % 3];
          ++which;
          const at::Tensor any = at::full({1}, spoils ? 1.0 : 0.0,
                                          at::TensorOptions(at::kDouble).device(test_device()));
          const double num_spoilt = mesh.group(pp)
                                        ->all_reduce(mesh.group(dp | cp | tp)->all_reduce(any))
                                        .template item<double>();
          EXPECT_EQ(all_finite(list), num_spoilt == 0) << list[p].stored->spec.name << " on rank "
                                                       << rank << " of " << mesh.shape().describe();
        }
    });
}

// One step of plain SGD at rate 1 moves a parameter by its clipped gradient.
TEST(Clip, ScalesTheGradientsOfBothViewsOnEveryMesh) {
  const double norm_before = expected_norm();
  for (const auto& shape : meshes())
    on_mesh(shape, [&](const Mesh& mesh) {
      Model model;
      model.set_gradients();
      const ParamList list = model.list();
      const at::Tensor factor = clip_factor(grad_norm(list), 0.5);
      EXPECT_NEAR(factor.item<double>(), 0.5 / norm_before, 1e-12);
      const auto before = model.values();
      Optimizer optimizer(list, std::make_shared<Sgd>(SgdConfig{.momentum = 0}));
      optimizer.begin_step(1);
      optimizer.update(factor, at::zeros_like(factor));
      optimizer.end_step(false);
      const auto after = model.values();
      model.each_param([&](auto& p) {
        const at::Tensor expected =
            slice(whole_gradient(p.stored().spec, 0), p.stored().compute) * factor;
        EXPECT_TRUE(at::equal(after.at(p.name()), before.at(p.name()) - expected))
            << p.name() << " on " << mesh.shape().describe();
      });
      EXPECT_EQ(
          [&] {
            model.set_gradients();
            return clip_factor(grad_norm(list), 2 * norm_before).item<double>();
          }(),
          1)
          << "a norm below the limit changes nothing";
    });
}

// Whatever the gradients and the factor are.
TEST(Optimizer, MovesNothingInAStepThatIsSkipped) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::shared_ptr<const Rule> rules[] = {std::make_shared<Sgd>(SgdConfig{.momentum = 0.7}),
                                               std::make_shared<AdamW>()};
  for (const auto& rule : rules)
    on_mesh({.tp = 2, .ep = 2}, [&](const Mesh&) {
      Model model, other;
      Optimizer skipping(model.list(), rule), plain(other.list(), rule);
      for (int step = 0; step < 3; ++step) {
        model.set_gradients(step), other.set_gradients(step);
        take_step(skipping, 0.1), take_step(plain, 0.1);
        for (const double value : {nan, 0.5}) {
          for (const auto& entry : skipping.params())
            entry.stored->value.mutable_grad() = at::full_like(entry.stored->value.detach(), value);
          skipping.begin_step(0.1);
          const at::Tensor factor =
              at::full({}, value, at::TensorOptions(test_device()).dtype(at::kDouble));
          skipping.update(factor, at::ones_like(factor));
          skipping.end_step(true);
        }
      }
      EXPECT_EQ(skipping.num_steps(), 3);
      const auto one = model.values(), two = other.values();
      for (const auto& [name, value] : one) EXPECT_TRUE(at::equal(value, two.at(name))) << name;
    });
}

}  // namespace
}  // namespace moesh::optim
