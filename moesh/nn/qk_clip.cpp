#include "moesh/nn/qk_clip.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "moesh/base/error.h"

namespace moesh::nn {
namespace {

at::Tensor largest_over(Axes axis, const at::Tensor& largest) {
  return current_mesh().group(axis)->all_reduce(largest, comm::ReduceOp::max);
}

void scale(const LogitRows& rows, const at::Tensor& factors_h) {
  Stored& w = *rows.weight;
  const at::Tensor factors_hr =
      at::ones({factors_h.size(0), rows.of_head}, factors_h.options().dtype(w.value.scalar_type()));
  factors_hr.narrow(1, rows.begin, rows.count).copy_(factors_h.pow(rows.power).unsqueeze(1));
  MOESH_CHECK(factors_hr.numel() == w.compute.length[0], "QK-clip: '", w.spec.name, "' has ",
              w.compute.length[0], " rows on this tp rank, and ", factors_h.size(0), " heads of ",
              rows.of_head);
  // The rows of its tp rank that this rank stores.
  std::vector<std::int64_t> sizes(w.shard.length.size(), 1);
  sizes[0] = w.shard.length[0];
  w.value.mul_(factors_hr.flatten()
                   .narrow(0, w.shard.start[0] - w.compute.start[0], sizes[0])
                   .reshape(sizes));
  raw::current_copy(w);  // here, so that a CUDA graph makes it anew in every replay
}

}  // namespace

at::Tensor largest_logits(const std::vector<Attention*>& layers) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> largest;
  for (Attention* a : layers) largest.push_back(a->max_logits().largest_h());
  return largest_over(cp, largest_over(dp, at::cat(largest)));
}

void clip_logits(Attention& layer, const at::Tensor& largest_h, double tau,
                 const at::Tensor& skip) {
  const at::NoGradGuard no_grad;
  const at::Tensor factors_h = at::where(largest_h.gt(tau).logical_and(skip.eq(0)), tau / largest_h,
                                         at::ones_like(largest_h));
  for (const LogitRows& rows : layer.logit_rows()) scale(rows, factors_h);
}

at::Tensor clip_logits(const std::vector<Attention*>& layers, double tau, const at::Tensor& skip) {
  const at::NoGradGuard no_grad;
  const at::Tensor all = largest_logits(layers);  // one message for all layers
  std::int64_t first = 0;
  for (Attention* a : layers) {
    const auto num_heads = a->max_logits().largest_h().size(0);
    clip_logits(*a, all.narrow(0, first, num_heads), tau, skip);
    a->max_logits().clear();
    first += num_heads;
  }
  return largest_over(pp, largest_over(tp, all.max()));
}

}  // namespace moesh::nn
