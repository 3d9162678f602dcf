#pragma once
// A parameter that is split and stored in shards, as one tensor.

#include <ATen/core/grad_mode.h>

#include "moesh/base/error.h"
#include "moesh/fsdp/param.h"
#include "moesh/types/token.h"

namespace moesh {

struct Join {
  Axes axis;
  std::int64_t dim;
  std::vector<std::int64_t> sizes;  // of each rank's piece along dim
};

// The box that is left when the axes `cuts` do not cut, and how to join them, the innermost first.
struct JoinedRegion {
  Region box;
  std::vector<Join> joins;
};

inline JoinedRegion joined(const Stored& w, Axes cuts) {
  MOESH_CHECK(contains(w.cutting, cuts), ErrorKind::config, "parameter '", w.spec.name,
              "' is joined over ", to_string(cuts), ", and it is cut on ", to_string(w.cutting));
  const auto& mesh = current_mesh();
  const std::vector<std::int64_t> zeros(w.spec.shape.size(), 0);
  JoinedRegion result{.box = {zeros, w.spec.shape}};
  Region cut = result.box;  // by all axes so far
  std::vector<bool> is_joined(w.spec.shape.size());
  for (const auto& [axis, dim] : w.spec.cuts) {
    const auto d = static_cast<std::size_t>(dim);
    const Pieces pieces{cut.length[d], mesh.size(axis)};
    const auto apply = [&, part = mesh.coordinate(axis)](Region& region) {
      region.start[d] += pieces.start(part);
      region.length[d] = pieces.length(part);
    };
    apply(cut);
    if (contains(cuts, axis)) {
      result.joins.insert(result.joins.begin(), {axis, dim, pieces.lengths()});
      is_joined[d] = true;
      continue;
    }
    MOESH_CHECK(!is_joined[d], ErrorKind::config, "parameter '", w.spec.name, "': dimension ", dim,
                " is cut on ", to_string(axis),
                " last, so the outer cut cannot be joined without it; join both");
    apply(result.box);
  }
  return result;
}

/// Joins what the ranks have of something shaped like the parameter (its value, its gradient, an
/// optimizer's state): over its storage and over `cuts`, some of the axes that cut it. With all of
/// w.cutting, as by default, it is the full tensor [w.spec.shape]. An axis that is left out keeps
/// its slice: with only etp, a rank gets the full matrices of its own experts.
/// Every rank of the current mesh makes the call, also one whose shard is empty, and the replicas
/// get the same bits. Without autograd.
inline at::Tensor gather_full(const Stored& w, const at::Tensor& shard, Axes cuts) {
  const at::NoGradGuard no_grad;
  const auto& mesh = current_mesh();
  at::Tensor out = raw::gather(w, shard);
  for (const auto& [axis, dim, sizes] : joined(w, cuts).joins)
    if (const auto& group = mesh.group(axis); group->size() > 1)
      out = raw::run(Step::all_gather, out, *group, dim, sizes);
  return out;
}

inline at::Tensor gather_full(const Stored& w, const at::Tensor& shard) {
  return gather_full(w, shard, w.cutting);
}

/// The inverse, without communication: this rank's shard of the result of gather_full, as a view.
inline at::Tensor shard_of(const Stored& w, const at::Tensor& full, Axes cuts) {
  const Region box = joined(w, cuts).box;
  MOESH_CHECK(full.sizes().vec() == box.length, ErrorKind::config, "parameter '", w.spec.name,
              "': the shard of a tensor of ", full.sizes(), "; joined over ", to_string(cuts),
              " it has ", at::IntArrayRef(box.length));
  at::Tensor out = full;
  for (std::size_t d = 0; d < box.start.size(); ++d)
    out = out.narrow(static_cast<std::int64_t>(d), w.shard.start[d] - box.start[d],
                     w.shard.length[d]);
  return out;
}

inline at::Tensor shard_of(const Stored& w, const at::Tensor& full) {
  return shard_of(w, full, w.cutting);
}

}  // namespace moesh
