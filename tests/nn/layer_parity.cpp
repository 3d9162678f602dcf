#include "tests/nn/layer_parity.h"
#include "tests/nn/router_statistics.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <sstream>

#include "moesh/base/error.h"
#include "moesh/base/random.h"
#include "moesh/fsdp/fsdp.h"

namespace moesh::verify {
namespace {

using enum Place;

constexpr double kBiasCoeff = 0.01;

// [num_dp * B, L, D], by global index.
at::Tensor make_data(const LayerCase& c, std::int64_t num_sequences, const char* stream) {
  const auto dim = c.layer.experts.dim;
  at::Tensor x = at::empty({num_sequences, c.sequence, dim}, at::kDouble);
  const Random random(17, stream);
  for (std::int64_t i = 0; i < x.numel(); ++i)
    x.data_ptr<double>()[i] =
        random.normal(static_cast<std::uint64_t>(c.identical_tokens ? i % dim : i));
  return x.to(at::TensorOptions(c.options.device).dtype(c.options.dtype));
}

SequenceShard shard_of(const LayerCase& c, const Mesh& mesh) {
  if (c.sequence_parallel)
    return SequenceShard(c.batch, c.sequence, mesh.size(kSequenceAxes),
                         mesh.coordinate(kSequenceAxes));
  return SequenceShard(c.batch, c.sequence, mesh.size(cp), mesh.coordinate(cp), mesh.size(tp));
}

// What this rank has of [num_dp * B, L, D]: its sequences, and its shard or span of each.
at::Tensor mine(const at::Tensor& whole, const LayerCase& c, const Mesh& mesh) {
  const auto shard = shard_of(c, mesh);
  return whole.narrow(0, mesh.coordinate(dp) * c.batch, c.batch)
      .narrow(1, shard.start(), shard.length());
}

// One forward, backward and bias update, the same code on every mesh.
std::vector<RankTensor> run_layer(const LayerCase& c, const Mesh& mesh, RoutingRecord* record,
                                  RoutingRecord* replay) {
  nn::Moe moe(c.layer, c.options);
  if (c.equal_scores) {
    const at::NoGradGuard no_grad;
    moe.router().gate().stored().value.zero_();
  }
  const nn::Tokens tokens(mesh, c.batch, c.sequence, c.sequence_parallel);
  const std::int64_t num_sequences = c.batch * mesh.size(dp),
                     num_tokens = num_sequences * c.sequence;
  const at::Tensor count = at::full({}, static_cast<double>(num_tokens), at::kDouble);
  // The objective is a random linear function of the output, plus the auxiliary losses.
  const at::Tensor x = mine(make_data(c, num_sequences, "x"), c, mesh);
  const at::Tensor weights = mine(make_data(c, num_sequences, "objective"), c, mesh);
  VerifyProbe probe;
  probe.record = record;
  probe.replay_from(replay);
  const nn::RouteOptions options{.probe = &probe};

  at::Tensor leaf, y;
  nn::Route route;
  const auto with_auxiliary = [&](nn::TokenSum loss) {
    const auto& r = c.layer.router;
    const auto wide = [](const nn::TokenSum& t) { return cast(t, at::kDouble); };
    loss = wide(loss);
    if (c.balance_weight != 0)
      loss = loss + scale(wide(nn::balance_loss(route, r, tokens, count, c.balance_over, options)),
                          c.balance_weight);
    if (c.z_weight != 0) loss = loss + scale(wide(nn::z_loss(route, count)), c.z_weight);
    return loss;
  };
  nn::TokenSum loss, squares;
  // mine() cuts a tensor as the residual stream is cut.
  const auto run = [&]<Place Tp>(auto total) {
    const auto stream = [](const at::Tensor& t) { return assume<Dense{T, T, Tp}>(t); };
    const auto input = as_leaf(stream(x));
    const auto out = moe(input, tokens, options);
    leaf = local(input), y = local(out.y).detach();
    route = out.route;
    const auto wide = cast(out.y, at::kDouble);
    squares = total(square(detach(wide)));
    loss = with_auxiliary(total(wide * stream(weights.to(at::kDouble))));
  };
  if (c.sequence_parallel)
    run.operator()<T>([](const auto& t) { return sum_all(t); });
  else
    run.operator()<I>([](const auto& t) { return once<tp>(sum_all(t)); });
  backward(loss);

  const auto whole = [](const at::Tensor& t) { return t; };
  const auto of_rank = [&](const at::Tensor& t) { return mine(t, c, mesh); };
  std::vector<RankTensor> tensors;
  const TokenOrigin origin{mesh.coordinate(dp) * c.batch, shard_of(c, mesh).ranges()};
  tensors.push_back({"counts", nn::statistics(route).counts_E, whole, /*exact=*/true});
  tensors.push_back({"output", y, of_rank, false, origin});
  // A sum of outputs with random weights of size one is of the size of the output, also where it
  // happens to cancel.
  const double terms = std::sqrt(number(all_reduce<kTokenAxes>(squares)));
  tensors.push_back(
      {"loss", local(all_reduce<kTokenAxes>(loss)).detach(), whole, false, {}, terms});
  tensors.push_back({"d(x)", leaf.grad(), of_rank, false, origin});
  moe.each_param([&](auto& w) {
    tensors.push_back(
        {"d(" + w.name() + ")", local(grad(w)),
         [region = w.stored().compute](const at::Tensor& t) { return slice(t, region); }});
  });
  moe.router().update_bias(kBiasCoeff);
  tensors.push_back({"expert bias", moe.router().expert_bias(), whole});
  return tensors;
}

}  // namespace

std::string LayerCase::describe() const {
  std::ostringstream os;
  os << (sequence_parallel ? "sp" : "no-sp")
     << (layer.experts.scores == kernels::ScoreSide::after ? " after " : " before ")
     << nn::to_string(layer.dispatcher)
     << (layer.shared_ffn ? " shared" + std::to_string(layer.shared_ffn) : "")
     << (layer.experts.biases ? " biases" : "") << " B" << batch << " L" << sequence << " E"
     << layer.router.num_experts << " K" << layer.router.top_k << " F" << layer.experts.ffn << " "
     << at::toString(options.dtype);
  return os.str();
}

std::string LayerReport::describe(const LayerCase& c, const MeshShape& mesh) const {
  std::ostringstream os;
  os << mesh.describe() << ", " << c.describe() << ": ";
  if (holds()) return os.str() + "holds";
  if (!error.empty()) os << "threw: " << error;
  for (const auto& m : mismatches) os << "\n  " << m.describe(mesh);
  return os.str();
}

double layer_tolerance(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-10 : dtype == at::kFloat ? 1e-5 : 2e-2;
}

LayerResult run_reference(const LayerCase& c, int num_dp) {
  LayerCase whole = c;
  whole.batch = c.batch * num_dp;
  whole.sequence_parallel = true;
  whole.layer.dispatcher = nn::Dispatcher::local;
  LayerResult result;
  result.routing =
      std::make_shared<RoutingRecord>(1, whole.batch * c.sequence, c.layer.router.top_k);
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  for (auto& t : run_layer(whole, mesh, result.routing.get(), nullptr))
    result.tensors.emplace_back(t.name, t.value);
  return result;
}

std::vector<LayerReport> compare_layer(const std::vector<LayerCase>& cases,
                                       const std::vector<const LayerResult*>& references,
                                       const MeshShape& shape, const comm::LaunchOptions& options) {
  std::vector<LayerReport> reports(cases.size());
  std::vector<std::unique_ptr<Findings>> findings;
  for (const auto* r : references)
    findings.push_back(std::make_unique<Findings>(
        shape.num_ranks(), *r, layer_tolerance(cases[findings.size()].options.dtype)));
  // After a fault the world is started again with the case after the one that failed.
  size_t next = 0;
  while (next < cases.size()) {
    // The last case that a rank has begun: ranks are at most one case apart.
    std::atomic<size_t> current = next;
    try {
      comm::launch(
          shape.num_ranks(),
          [&](comm::Group& world) {
            const Mesh mesh(world, shape);
            const MeshScope scope(mesh);
            for (size_t i = next; i < cases.size(); ++i) {
              for (size_t seen = current; seen < i && !current.compare_exchange_weak(seen, i);) {
              }
              auto* replay = cases[i].replay ? references[i]->routing.get() : nullptr;
              for (const auto& t : run_layer(cases[i], mesh, nullptr, replay))
                findings[i]->compare(t, world.rank());
              world.barrier();
            }
          },
          options);
      break;
    } catch (const std::exception& e) {
      reports[current].error = e.what();
      next = current + 1;
    }
  }
  for (size_t i = 0; i < cases.size(); ++i) {
    if (reports[i].error.empty())
      reports[i].mismatches = findings[i]->mismatches(shape.validated());
    if (cases[i].replay) {
      reports[i].num_flipped = references[i]->routing->num_flipped;
      reports[i].largest_margin = references[i]->routing->largest_margin;
    }
  }
  return reports;
}

}  // namespace moesh::verify
