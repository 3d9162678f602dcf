#pragma once
// Parameters of every layout kind, in sizes that nothing divides, with gradients that depend on the
// global index only.

#include <ATen/ops/empty.h>

#include <map>
#include <string>
#include <vector>

#include "moesh/base/random.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/optim/params.h"
#include "tests/spmd/device.h"

namespace moesh::optim {

using enum Place;

template <class F>
void on_mesh(const MeshShape& shape, F f, comm::LaunchOptions options = test_options()) {
  comm::launch(
      shape.num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, shape);
        const MeshScope scope(mesh);
        f(mesh);
      },
      options);
}

/// Every mesh of 1 to 8 ranks.
inline std::vector<MeshShape> meshes() {
  std::vector<MeshShape> all;
  for (int n = 1; n <= 8; ++n)
    for (const auto& shape : all_mesh_shapes(n)) all.push_back(shape);
  return all;
}

inline at::Tensor slice(at::Tensor x, const Region& r) {
  for (std::size_t d = 0; d < r.start.size(); ++d)
    x = x.narrow(static_cast<std::int64_t>(d), r.start[d], r.length[d]);
  return x;
}

/// The whole gradient of a parameter in a step.
inline at::Tensor whole_gradient(const ParamSpec& spec, int step) {
  at::Tensor g = at::empty(spec.shape, at::kDouble);
  const Random random(17, spec.name + "/" + std::to_string(step));
  for (std::int64_t i = 0; i < g.numel(); ++i)
    g.data_ptr<double>()[i] = random.normal(static_cast<std::uint64_t>(i));
  return g.to(at::TensorOptions(spec.device).dtype(spec.dtype));
}

/// A few parameters: replicated and cut over tp, experts, biases of experts that are the same on
/// etp, and a single number, of which all but one of its storage ranks have an empty shard.
struct Model {
  static ParamSpec spec(const std::string& name, std::vector<std::int64_t> shape,
                        std::vector<std::pair<Axes, std::int64_t>> cuts,
                        std::int64_t storage_dim = 0) {
    return {.name = name,
            .shape = std::move(shape),
            .cuts = std::move(cuts),
            .storage_dim = storage_dim,
            .dtype = at::kDouble,
            .device = test_device()};
  }
  static Init init() { return {.kind = Init::Distribution::normal, .scale = 0.5, .seed = 3}; }

  Param<Dense{I, I, I}> norm{spec("norm", {7}, {}), init()};
  Param<Dense{I, I, F}> w{spec("w", {7, 5}, {{tp, 1}}), init()};
  Param<Sparse{I, E, F}> experts{spec("experts", {5, 7, 3}, {{ep, 0}, {etp, 1}}), init()};
  Param<Sparse{I, E, I}> bias{spec("bias", {5, 3}, {{ep, 0}}, 1), init()};
  Param<Dense{I, I, I}> sink{spec("sink", {1}, {}), init()};

  template <class Fn>
  void each_param(Fn f) {
    f(norm), f(w), f(experts), f(bias), f(sink);
  }
  ParamList list() {
    ParamList all;
    each_param([&](auto& p) {
      all.add(p, p.name() == "norm" || p.name() == "bias" ? Decay::off : Decay::on);
    });
    return all;
  }
  void set_gradients(int step = 0) {
    each_param([&](auto& p) {
      auto& s = p.stored();
      s.value.mutable_grad() = slice(whole_gradient(s.spec, step), s.shard).clone();
    });
  }
  /// What `use` gives this rank of every value.
  std::map<std::string, at::Tensor> values() {
    std::map<std::string, at::Tensor> all;
    each_param([&](auto& p) { all[p.name()] = local(value(p)).clone(); });
    return all;
  }
};

}  // namespace moesh::optim
