#include "tests/nn/delta_net_check.h"

#include <ATen/ATen.h>

#include <map>

#include "moesh/fsdp/fsdp.h"
#include "moesh/nn/delta_net.h"
#include "tests/kernels/ref_delta_rule.h"
#include "tests/spmd/device.h"

namespace moesh::delta_net_check {
namespace {

using enum Place;
using Weights = std::map<std::string, at::Tensor>;

constexpr std::int64_t kBatch = 2, kLength = 11, kDim = 6, kKeyHeads = 2, kValueHeads = 6;
const nn::DeltaNetConfig kConfig{.dim = kDim,
                                 .num_key_heads = kKeyHeads,
                                 .num_value_heads = kValueHeads,
                                 .key_dim = 4,
                                 .value_dim = 3,
                                 .num_taps = 3,
                                 .norm_eps = 1e-3,
                                 .most_decay = 1};

nn::DeltaNet make() {
  return {kConfig,
          "a",
          {.dtype = at::kDouble,
           .device = test_device(),
           .init = {.kind = Init::Distribution::normal, .scale = 0.7, .seed = 3}}};
}

at::Tensor starts() {
  return at::tensor({0, 0, 0, 3, 3, 3, 3, 3, 8, 9, 9, 0, 1, 1, 1, 1, 5, 5, 5, 5, 5, 5}, at::kLong)
      .reshape({kBatch, kLength});
}

at::Tensor formula(const Weights& w, const at::Tensor& x_BLD, const at::Tensor& starts_BL) {
  const std::int64_t d = kConfig.key_dim, v = kConfig.value_dim, r = kValueHeads / kKeyHeads;
  const auto by_head = [&](const std::string& name) {
    return x_BLD.matmul(w.at(name + ".weight").t()).unflatten(-1, {kKeyHeads, -1});
  };
  const at::Tensor qkvz = by_head("in_proj_qkvz"), ba = by_head("in_proj_ba");
  const auto convolved = [&](const std::string& name, std::int64_t first, std::int64_t count) {
    return kernels::ref::convolution(qkvz.narrow(3, first, count),
                                     w.at("conv1d." + name).reshape({kKeyHeads, count, -1}),
                                     starts_BL);
  };
  const at::Tensor qkv = at::cat(
                       {convolved("q", 0, d), convolved("k", d, d), convolved("v", 2 * d, r * v)},
                       3),
                   beta = ba.narrow(3, 0, r).flatten(2, 3).sigmoid(),
                   time = ba.narrow(3, r, r).flatten(2, 3),
                   decay = -w.at("A_log").exp() * (1 + (time + w.at("dt_bias")).exp()).log();
  const at::Tensor y = kernels::ref::delta_rule({qkv, decay, beta, d, starts_BL}).y_BLhv;
  const at::Tensor normal =
      y / (y.square().mean(-1, true) + kConfig.norm_eps).sqrt() * w.at("norm.weight");
  const at::Tensor z = qkvz.narrow(3, 2 * d + r * v, r * v).reshape(y.sizes());
  return (normal * z * z.sigmoid()).flatten(2, 3).matmul(w.at("out_proj.weight").t());
}

at::Tensor input() {
  at::manual_seed(7);
  return at::randn({kBatch, kLength, kDim}, at::kDouble);
}

bool close(const at::Tensor& a, const at::Tensor& b) {
  return at::allclose(a.detach().cpu(), b.detach(), 1e-9, 1e-11);
}

}  // namespace

std::string complaint(const MeshShape& shape, bool has_documents) {
  const at::Tensor starts_BL = has_documents ? starts() : at::Tensor();
  Weights leaves;
  {
    const OneRankScope scope;
    make().each_param([&](Stored& w) {
      leaves[w.spec.name.substr(2)] = w.value.detach().cpu().clone().requires_grad_(true);
    });
  }
  const at::Tensor x_leaf = input().requires_grad_(true),
                   wanted = formula(leaves, x_leaf, starts_BL);
  const at::Tensor dy = at::arange(wanted.numel(), at::kDouble).sin().reshape(wanted.sizes());
  (wanted * dy).sum().backward();
  std::string wrong;
  comm::launch(
      shape.num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, shape);
        const MeshScope scope(mesh);
        const nn::Tokens tokens(mesh, kBatch, kLength, true, SequenceCut::contiguous, {},
                                {has_documents ? starts_BL.to(test_device()) : at::Tensor(), 12});
        nn::DeltaNet layer = make();
        const auto x = as_leaf(assume<Dense{T, T, R}>(x_leaf.detach().clone().to(test_device())));
        const auto y = layer(x, tokens);
        const bool is_same = close(local(all_reduce<tp>(y)), wanted);
        if (world.rank() == 0 && !is_same) wrong = "y";
        if (shape.num_ranks() > 1 || !is_same) return;
        (local(y) * dy.to(test_device())).sum().backward();
        if (!close(local(x).grad(), x_leaf.grad())) wrong = "x";
        layer.each_param([&](Stored& w) {
          if (wrong.empty() && !close(w.value.grad(), leaves.at(w.spec.name.substr(2)).grad()))
            wrong = w.spec.name;
        });
      },
      test_options());
  return wrong;
}

}  // namespace moesh::delta_net_check
