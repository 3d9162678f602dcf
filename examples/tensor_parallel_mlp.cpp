// A two-layer MLP on tp ranks with sequence parallelism, and its gradient check against one rank.
// The ranks are threads: run it as it is, or under mpirun -n 4.

#include <ATen/ATen.h>

#include <cstdio>
#include <mutex>

#include "moesh/base/random.h"
#include "moesh/fsdp/fsdp.h"

using namespace moesh;
using enum Place;

constexpr int64_t B = 2, L = 7, D = 8, F4 = 12;  // 7 positions on 4 ranks: shards of 2, 2, 2 and 1

using Shards = Tensor<Dense{T, T, T}>;        // every rank holds its own tokens
using Column = Param<Dense{I, I, Place::F}>;  // every rank holds its own features

// Leave out the all_gather, or the reduce_scatter, and this does not compile.
// [readme]
Shards mlp(const Shards& x_BLD, const Column& w1_FD, const Column& w2_DF) {
  const SplitDim sequence{.dim = 1, .total = L};
  auto h_BLF = silu(linear(all_gather<tp>(x_BLD, sequence), use(w1_FD)));  // T -> R, column: F
  return reduce_scatter<tp>(linear(h_BLF, use(w2_DF)), sequence);          // row: P -> T
}
// [/readme]

struct Result {
  at::Tensor loss, dx, dw1, dw2;
};

at::Tensor make_input() {
  at::Tensor x = at::empty({B, L, D}, at::kDouble);
  for (int64_t i = 0; i < x.numel(); ++i) x.data_ptr<double>()[i] = Random(1, "x").normal(i);
  return x;
}

Result run(comm::Group& world) {
  Mesh mesh(world, {.tp = world.size()});
  MeshScope scope(mesh);
  const Init init{.kind = Init::Distribution::normal, .scale = 0.5, .seed = 7};
  const Column w1({.name = "w1", .shape = {F4, D}, .cuts = {{tp, 0}}, .dtype = at::kDouble}, init);
  const Column w2({.name = "w2", .shape = {D, F4}, .cuts = {{tp, 1}}, .dtype = at::kDouble}, init);

  auto x = as_leaf(keep<tp>(assume<Dense{T, T, I}>(make_input()), {.dim = 1}));
  auto loss = sum_all(square(mlp(x, w1, w2)));  // a sum over tokens: P on every axis
  backward(loss);
  return {local(all_reduce<tp>(loss)), local(all_gather<tp>(grad(x), {.dim = 1, .total = L})),
          local(all_gather<tp>(grad(w1), {.dim = 0, .total = F4})),
          local(all_gather<tp>(grad(w2), {.dim = 1, .total = F4}))};
}

int main() try {
  const int num_ranks = comm::num_launched_processes() > 0 ? comm::num_launched_processes() : 4;
  Result alone = run(*comm::solo_group());
  bool right = true;
  comm::launch(num_ranks, [&](comm::Group& world) {
    const Result r = run(world);
    const auto close = [](const at::Tensor& a, const at::Tensor& b) {
      return (a - b).abs().max().item<double>() < 1e-12;
    };
    const bool same = close(r.loss, alone.loss) && close(r.dx, alone.dx) &&
                      close(r.dw1, alone.dw1) && close(r.dw2, alone.dw2);
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    right = right && same;
    if (world.rank() == 0)
      // Digits that every processor has in common.
      std::printf("loss %.6f on %d ranks, %.6f on one\n", r.loss.item<double>(), num_ranks,
                  alone.loss.item<double>());
  });
  std::printf("gradients %s\n", right ? "agree" : "DIFFER");
  return right ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
