#include "tests/optim/muon_check.h"
#include "tests/optim/take_step.h"

#include <ATen/Functions.h>

#include <cmath>
#include <memory>

#include "moesh/optim/optimizer.h"

namespace moesh::optim::muon_check {

std::map<std::string, at::Tensor> train(const MuonConfig& config, int num_steps) {
  Matrices all;
  ParamList list;
  all.each_param([&](auto& p) { list.add(p, p.name() == "up" ? Decay::off : Decay::on); });
  Optimizer optimizer(list, std::make_shared<Muon>(config));
  for (int step = 0; step < num_steps; ++step) {
    all.each_param([&](auto& p) {
      auto& s = p.stored();
      s.value.mutable_grad() = slice(whole_gradient(s.spec, step), s.shard).clone();
    });
    take_step(optimizer, kRate);
  }
  std::map<std::string, at::Tensor> values;
  all.each_param([&](auto& p) { values[p.name()] = local(value(p)).clone(); });
  return values;
}

namespace {

// By singular values: each goes through p(s) = a s + b s^3 + c s^5 five times.
at::Tensor by_singular_values(const at::Tensor& g) {
  auto [u, s, vh] = at::linalg_svd(g / g.norm(), /*full_matrices=*/false);
  for (int i = 0; i < 5; ++i) s = 3.4445 * s - 4.7750 * s.pow(3) + 2.0315 * s.pow(5);
  return at::matmul(u * s, vh);
}

at::Tensor expected(const ParamSpec& spec, const MuonConfig& c, const at::Tensor& first) {
  const bool is_stack = spec.shape.size() == 3;
  const std::int64_t count = is_stack ? spec.shape[0] : c.by_head ? spec.num_heads : 1;
  const std::int64_t m = spec.shape.back(), n = first.numel() / count / m;
  at::Tensor w = first.reshape({count, n, m}).clone(), mean = at::zeros_like(w);
  for (int step = 0; step < 3; ++step) {
    const at::Tensor g = whole_gradient(spec, step).reshape({count, n, m});
    mean = c.momentum * mean + (1 - c.momentum) * g;
    const at::Tensor u = c.nesterov ? (1 - c.momentum) * g + c.momentum * mean : mean;
    if (spec.name != "up") w = w - kRate * c.weight_decay * w;
    for (std::int64_t k = 0; k < count; ++k)
      w[k] -=
          kRate * 0.2 * std::sqrt(static_cast<double>(std::max(n, m))) * by_singular_values(u[k]);
  }
  return w.reshape(spec.shape);
}

}  // namespace

std::string complaint(const MeshShape& shape, const MuonConfig& config) {
  std::map<std::string, at::Tensor> wanted;
  on_mesh({}, [&](const Mesh&) {
    Matrices().each_param([&](auto& p) {
      wanted[p.name()] = expected(p.stored().spec, config, p.stored().value.detach());
    });
  });
  std::vector<std::string> wrong(static_cast<std::size_t>(shape.num_ranks()));
  on_mesh(shape, [&](const Mesh& mesh) {
    const auto found = train(config);
    Matrices().each_param([&](auto& p) {
      std::string& first = wrong[static_cast<std::size_t>(mesh.rank())];
      if (first.empty() &&
          !at::allclose(found.at(p.name()), slice(wanted.at(p.name()), p.stored().compute), 1e-11,
                        1e-12))
        first = p.name();
    });
  });
  for (const std::string& name : wrong)
    if (!name.empty()) return name;
  return "";
}

}  // namespace moesh::optim::muon_check
