// A mixture of experts written out by hand: two experts a rank on ep 2 x etp 2, an all_to_all to
// the experts and back, and the gradients checked against one rank. Every line that changes hands
// between ranks says so in its types.

#include <ATen/ATen.h>

#include <cstdio>
#include <mutex>

#include "moesh/base/random.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/types/token.h"

using namespace moesh;
using enum Place;

constexpr int64_t N = 27, D = 6, H = 10, E4 = 4;  // tokens, model width, expert width, experts

using Tokens = Tensor<Dense{T, T, T}>;
using Experts =
    Param<Sparse{I, Place::E, Place::F}>;  // own experts on ep, own features of them on etp

// Which expert a token goes to: any function of the global token, never of the rank.
int64_t expert_of(GlobalToken t) {
  return static_cast<int64_t>(Random(3, "choice").below(static_cast<uint64_t>(t.value), E4));
}

// counts[s][e]: rows that rank s of ep x etp has for expert e.
at::Tensor gather_counts(const std::vector<int64_t>& mine) {
  const auto group = current_mesh().group(kExpertAxes);
  return group->all_gather(at::tensor(mine, at::kLong).reshape({1, E4}));
}

Tokens moe(const Tokens& x_ND, const std::vector<int64_t>& choice, const Experts& w1_EHD,
           const Experts& w2_EDH) {
  const auto& mesh = current_mesh();
  const int num_ep = mesh.size(ep), num_etp = mesh.size(etp), my_ep = mesh.coordinate(ep),
            my_etp = mesh.coordinate(etp);
  const int64_t num_local = E4 / num_ep;

  // Sort the rows by expert (stable), and tell everyone how many go where.
  std::vector<int64_t> order, mine(E4);
  for (int64_t e = 0; e < E4; ++e)
    for (size_t i = 0; i < choice.size(); ++i)
      if (choice[i] == e) order.push_back(static_cast<int64_t>(i)), ++mine[e];
  const at::Tensor gathered = gather_counts(mine);
  const auto counts = gathered.accessor<int64_t, 2>();
  const auto rows_for = [&](int from_ep, int from_etp, int to_ep) {
    int64_t n = 0;
    for (int64_t e = 0; e < num_local; ++e)
      n += counts[from_ep * num_etp + from_etp][to_ep * num_local + e];
    return n;
  };
  std::vector<int64_t> send, recv, parts;
  for (int r = 0; r < num_ep; ++r)
    send.push_back(rows_for(my_ep, my_etp, r)), recv.push_back(rows_for(r, my_etp, my_ep));
  for (int t = 0; t < num_etp; ++t) {
    parts.push_back(0);
    for (int r = 0; r < num_ep; ++r) parts.back() += rows_for(r, t, my_ep);
  }

  const at::Tensor index = at::tensor(order, at::kLong);
  auto sorted =
      declare<Dense{T, T, T}>([&](const at::Tensor& x) { return x.index_select(0, index); }, x_ND);
  auto rows = all_gather<etp>(to_experts<ep>(sparse(sorted), send, recv),
                              {.dim = 0, .sizes = parts});  // T,E,R

  // Blocks arrive by (etp, ep) of their origin, sorted by expert within: take them as they come, in
  // that order.
  auto w1 = use(w1_EHD), w2 = use(w2_EDH);  // R,E,F
  std::vector<Tensor<Sparse{T, Place::E, P}>> outputs;
  int64_t start = 0;
  for (int t = 0; t < num_etp; ++t)
    for (int r = 0; r < num_ep; ++r)
      for (int64_t e = 0; e < num_local; ++e) {
        const int64_t n = counts[r * num_etp + t][my_ep * num_local + e];
        auto h = silu(linear(narrow(rows, 0, start, n), select(w1, 0, e)));  // column: T,E,F
        outputs.push_back(linear(h, select(w2, 0, e)));                      // row: T,E,P
        start += n;
      }
  auto home = to_owners<ep>(reduce_scatter<etp>(cat(outputs, 0), {.dim = 0, .sizes = parts}), recv,
                            send);  // T,T,T
  return declare<Dense{T, T, T}>(
      [&](const at::Tensor& y) { return at::zeros_like(y).index_copy(0, index, y); }, dense(home));
}

struct Result {
  at::Tensor y, dx, dw1, dw2;
};

Result run(comm::Group& world, const MeshShape& shape) {
  Mesh mesh(world, shape);
  MeshScope scope(mesh);
  const Init init{.kind = Init::Distribution::normal, .scale = 0.5, .seed = 7};
  const Experts w1(
      {.name = "w1", .shape = {E4, H, D}, .cuts = {{ep, 0}, {etp, 1}}, .dtype = at::kDouble}, init);
  const Experts w2(
      {.name = "w2", .shape = {E4, D, H}, .cuts = {{ep, 0}, {etp, 2}}, .dtype = at::kDouble}, init);

  const SequenceShard shard(1, N, world.size(), world.rank());
  std::vector<int64_t> choice;
  at::Tensor x = at::empty({shard.num_local(), D}, at::kDouble);
  for (int64_t i = 0; i < shard.num_local(); ++i) {
    const GlobalToken token = shard.global(LocalToken{i});
    choice.push_back(expert_of(token));
    for (int64_t d = 0; d < D; ++d)
      x[i][d] = Random(1, "x").normal(static_cast<uint64_t>(token.value * D + d));
  }
  auto leaf = as_leaf(assume<Dense{T, T, T}>(x));
  auto y = moe(leaf, choice, w1, w2);
  backward(sum_all(square(y)));
  const SplitDim tokens{.dim = 0, .total = N};
  const auto whole = [](const auto& g, int64_t dim) {
    return local(all_gather<ep>(all_gather<etp>(g, {.dim = dim, .total = H}), {.dim = 0}));
  };
  return {local(all_gather<dp>(y, tokens)), local(all_gather<dp>(grad(leaf), tokens)),
          whole(grad(w1), 1), whole(grad(w2), 2)};
}

int main() try {
  const Result alone = run(*comm::solo_group(), {});
  bool right = true;
  comm::launch(4, [&](comm::Group& world) {
    const Result r = run(world, {.dp_shard = 4, .ep = 2, .etp = 2});
    const auto close = [](const at::Tensor& a, const at::Tensor& b) {
      return (a - b).abs().max().item<double>() < 1e-12;
    };
    const bool same = close(r.y, alone.y) && close(r.dx, alone.dx) && close(r.dw1, alone.dw1) &&
                      close(r.dw2, alone.dw2);
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    right = right && same;
  });
  std::printf("output and gradients on ep 2 x etp 2 %s with one rank\n",
              right ? "agree" : "DO NOT AGREE");
  return right ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
