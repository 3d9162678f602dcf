// The largest logits of attention, which QK-clip goes by.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "moesh/fsdp/fsdp.h"
#include "moesh/nn/attention.h"

namespace moesh {
namespace {

using enum Place;
using nn::AttentionOptions;

// [heads], from all scores at once. starts [B, L]: where the document of a query begins.
at::Tensor largest_by_formula(const at::Tensor& q, const at::Tensor& k, const AttentionOptions& o,
                              const at::Tensor& starts) {
  const at::Tensor keys = k.repeat_interleave(q.size(2) / k.size(2), 2);
  const at::Tensor i = at::arange(q.size(1)).unsqueeze(1), j = at::arange(q.size(1));
  const at::Tensor start = starts.unsqueeze(1).unsqueeze(3);  // [B, 1, L, 1]
  at::Tensor hidden = (j > i).logical_or(j < start);
  if (o.window > 0) hidden = hidden.logical_or(i - j >= o.window);
  if (o.chunk > 0)
    hidden =
        hidden.logical_or((i - start).div(o.chunk, "floor") != (j - start).div(o.chunk, "floor"));
  return at::einsum("blhd,bshd->bhls", {q, keys})
      .mul(o.scale)
      .masked_fill(hidden, -INFINITY)
      .amax({0, 2, 3});
}

// Two passes, of the first sequence and of the others, on ranks that split sequence and heads.
at::Tensor largest_on_mesh(const at::Tensor& q, const at::Tensor& k, const AttentionOptions& o,
                           const at::Tensor& starts, const MeshShape& shape,
                           std::int64_t most_scores, SequenceCut cut) {
  at::Tensor largest = at::full({q.size(2)}, -INFINITY, q.options());
  std::mutex mutex;
  comm::launch(shape.num_ranks(), [&](comm::Group& world) {
    const Mesh mesh(world, shape);
    const MeshScope scope(mesh);
    nn::MaxLogits found;
    for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{0, 1},
                                       std::pair<std::int64_t, std::int64_t>{1, q.size(0) - 1}}) {
      const at::Tensor of_pass = starts.narrow(0, first, count);
      const nn::Tokens tokens(mesh, count, q.size(1), true, cut, {},
                              nn::Documents{of_pass, count * q.size(1)});
      const auto mine = [&](const at::Tensor& x) {
        const auto heads = x.size(2) / mesh.size(tp);
        return assume<Dense{T, T, F}>(tokens.my_span(x.narrow(0, first, count))
                                          .narrow(2, heads * mesh.coordinate(tp), heads));
      };
      found.see(mine(q), nn::start_seen_positions(mine(k), tokens, o).wait(), tokens, o,
                most_scores);
    }
    const auto heads = q.size(2) / mesh.size(tp);
    const std::lock_guard lock(mutex);
    at::Tensor to = largest.narrow(0, heads * mesh.coordinate(tp), heads);
    to.copy_(at::maximum(to, found.largest_h()));
  });
  return largest;
}

TEST(MaxLogits, AreThoseOfTheFormula) {
  at::manual_seed(3);
  for (const std::int64_t length : {1, 7, 40})
    for (const std::int64_t groups : {2, 4})
      for (const AttentionOptions& o :
           {AttentionOptions{.scale = 0.3}, AttentionOptions{.scale = 2, .window = 3},
            AttentionOptions{.scale = 1, .chunk = 5}}) {
        // Never the same for a query and a key: the largest is not always at the end.
        const at::Tensor q = at::randn({3, length, 4, 6}, at::kDouble),
                         k = at::randn({3, length, groups, 6}, at::kDouble);
        const at::Tensor ends = at::rand({3, length}).lt(0.2);
        const at::Tensor starts = std::get<0>((at::arange(length) * ends).to(at::kLong).cummax(1));
        const at::Tensor wanted = largest_by_formula(q, k, o, starts);
        for (const MeshShape& shape :
             {MeshShape{}, MeshShape{.cp = 2}, MeshShape{.tp = 2}, MeshShape{.cp = 3, .tp = 2}})
          for (const std::int64_t most_scores : {1, 300, 1 << 20})
            for (const SequenceCut cut : {SequenceCut::contiguous, SequenceCut::balanced})
              EXPECT_TRUE(at::allclose(largest_on_mesh(q, k, o, starts, shape, most_scores, cut),
                                       wanted, 1e-12, 0))
                  << shape.describe() << ", " << length << " tokens, " << groups << " groups, "
                  << most_scores << " scores at a time";
      }
}

}  // namespace
}  // namespace moesh
