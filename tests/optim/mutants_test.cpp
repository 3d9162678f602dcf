// Every mistake that can be switched on is found by comparing with one rank. This program is built
// from sources with MOESH_WITH_MUTANTS.

#include <gtest/gtest.h>

#include <cmath>

#include "moesh/base/mutant.h"
#include "moesh/optim/grad_norm.h"
#include "tests/optim/support.h"

namespace moesh::optim {
namespace {

constexpr double kMaxNorm = 0.5;

struct Result {
  double norm = 0;
  std::map<std::string, double>
      factors;  // of each clipped gradient to the one before, over the whole tensor
};

Result run(const MeshShape& shape, const std::string& mutant) {
  current_mutant() = mutant;
  Result result;
  on_mesh(shape, [&](const Mesh& mesh) {
    Model model;
    model.set_gradients();
    const ParamList list = model.list();
    const Norm norm = grad_norm(list);
    clip_gradients(list, norm, kMaxNorm);
    std::map<std::string, double> factors;
    model.each_param([&](auto& p) {
      const at::Tensor before = slice(whole_gradient(p.stored().spec, 0), p.stored().compute);
      factors[p.name()] = (local(grad(p)) / before).mean().template item<double>();
    });
    if (mesh.rank() == 0) result = {number(norm), factors};
  });
  current_mutant() = "";
  return result;
}

double sum_of_squares(const std::string& name) {
  double sum = 0;
  on_mesh({}, [&](const Mesh&) {
    Model().each_param([&](auto& p) {
      if (p.name() == name)
        sum = whole_gradient(p.stored().spec, 0).square().sum().template item<double>();
    });
  });
  return sum;
}

const std::vector<MeshShape> kMeshes{{.tp = 2, .ep = 2},
                                     {.dp_replicate = 2, .dp_shard = 2, .tp = 2, .etp = 2},
                                     {.cp = 2, .tp = 4, .ep = 4, .etp = 2}};

class OptimMutants : public testing::TestWithParam<std::size_t> {
 protected:
  void SetUp() override {
    reference_ = run({}, "");
    const Result healthy = run(shape(), "");
    ASSERT_NEAR(healthy.norm, reference_.norm, 1e-12);
    for (const auto& [name, factor] : healthy.factors)
      ASSERT_NEAR(factor, kMaxNorm / reference_.norm, 1e-12) << name;
  }
  static const MeshShape& shape() { return kMeshes[GetParam()]; }
  Result reference_;
};
INSTANTIATE_TEST_SUITE_P(Meshes, OptimMutants, testing::Range<std::size_t>(0, kMeshes.size()));

TEST_P(OptimMutants, ClipWithoutExpertsIsFound) {
  const Result wrong = run(shape(), "clip_without_experts");
  EXPECT_EQ(wrong.factors.at("experts"), 1);
  EXPECT_EQ(wrong.factors.at("bias"), 1);
  EXPECT_NEAR(wrong.factors.at("w"), kMaxNorm / reference_.norm, 1e-12);
}

TEST_P(OptimMutants, NormThatCountsReplicasOnTpIsFound) {
  const Result wrong = run(shape(), "norm_counts_tp_replicas");
  const double excess = (shape().tp - 1) * (sum_of_squares("norm") + sum_of_squares("sink")) +
                        (shape().etp - 1) * sum_of_squares("bias");
  EXPECT_NEAR(wrong.norm * wrong.norm, reference_.norm * reference_.norm + excess, 1e-10);
  EXPECT_GT(wrong.norm, reference_.norm + 1e-3);
}

}  // namespace
}  // namespace moesh::optim
