// Checks that mistakes in the gradient norm and the clip must not pass: against one rank, for
// parameters of every layout; and mistakes in Muon, by its formula.

#include <cmath>

#include "moesh/optim/optimizer.h"
#include "moesh/optim/params.h"
#include "moesh/optim/rules.h"
#include "moesh/spmd/ops.h"
#include "tests/mutants/check.h"
#include "tests/optim/muon_check.h"
#include "tests/optim/support.h"

namespace moesh::optim {
namespace {

using mutants::Check;
using mutants::Settings;

constexpr double kMaxNorm = 0.5;

struct Result {
  double norm = 0;
  std::map<std::string, double>
      factors;  // of what plain SGD moves a parameter by to its gradient, over the whole tensor
};

Result run(const MeshShape& shape) {
  Result result;
  on_mesh(shape, [&](const Mesh& mesh) {
    Model model;
    model.set_gradients();
    const ParamList list = model.list();
    const Norm norm = grad_norm(list);
    const at::Tensor factor = clip_factor(norm, kMaxNorm);
    const auto values = model.values();
    Optimizer optimizer(list, std::make_shared<Sgd>(SgdConfig{.momentum = 0}));
    optimizer.begin_step(1);
    optimizer.update(factor, at::zeros_like(factor));
    const auto moved = model.values();
    std::map<std::string, double> factors;
    model.each_param([&](auto& p) {
      const at::Tensor before = slice(whole_gradient(p.stored().spec, 0), p.stored().compute);
      const at::Tensor clipped = values.at(p.name()) - moved.at(p.name());
      factors[p.name()] = (clipped / before).mean().template item<double>();
    });
    if (mesh.rank() == 0) result = {number(norm), factors};
  });
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

const mutants::Provide clip("clip", [](Settings& settings) -> Check {
  const MeshShape shape = settings.take_mesh();
  const double right = kMaxNorm / run({}).norm;
  return [=] {
    std::ostringstream said;
    for (const auto& [name, factor] : run(shape).factors)
      if (std::abs(factor - right) > 1e-9)
        said << (said.str().empty() ? "" : ", ") << name << " is clipped by " << factor;
    return said.str();
  };
});

const mutants::Provide norm("norm", [](Settings& settings) -> Check {
  const MeshShape shape = settings.take_mesh();
  const double right = run({}).norm;
  const double replicas = (shape.tp - 1) * (sum_of_squares("norm") + sum_of_squares("sink")) +
                          (shape.etp - 1) * sum_of_squares("bias");
  return [=]() -> std::string {
    const double norm = run(shape).norm;
    if (std::abs(norm - right) < 1e-12) return "";
    const bool counted = std::abs(norm * norm - right * right - replicas) < 1e-10;
    return counted ? "replicas on tp and etp are counted" : "the norm differs";
  };
});

const mutants::Provide muon("muon", [](Settings& settings) -> Check {
  const MeshShape shape = settings.take_mesh();
  MuonConfig config = muon_check::kMuon;
  config.by_head = settings.take("by_head") != 0;
  return [=] { return muon_check::complaint(shape, config); };
});

}  // namespace
}  // namespace moesh::optim
