#pragma once
// Whether a tensor is laid out as its type says: what the ranks hold, put together by the layout,
// must be what one rank has.

#include <ATen/ATen.h>

#include <array>
#include <string>

#include "moesh/comm/mesh.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

/// Along which dimension each axis of the view cuts, where the layout says that it does.
using CutDims = std::array<std::int64_t, 3>;

/// "" if it is, or what is wrong. All ranks call it.
template <auto L>
std::string layout_complaint(const Mesh& mesh, const Tensor<L>& x, const CutDims& dims,
                             const at::Tensor& of_one_rank) {
  at::Tensor whole = x.local().detach();
  std::string found;
  for (size_t i = 3; i-- > 0;) {  // inner axes first: the outer ones cut what these make
    const Axes axis = L.axes[i];
    const Place place = places(L)[i];
    const auto group = mesh.group(axis);
    if (is_whole(place)) {
      const bool same = at::equal(group->all_reduce(whole, comm::ReduceOp::min),
                                  group->all_reduce(whole, comm::ReduceOp::max));
      if (!same) found += std::string("not the same on ") + to_string(axis) + "; ";
    } else if (place == Place::P) {
      whole = group->all_reduce(whole);
    } else {
      const at::Tensor size = at::full({1}, whole.size(dims[i]), at::kLong);
      const at::Tensor all = group->all_gather(size.to(whole.device())).cpu();
      const std::vector<std::int64_t> sizes(all.data_ptr<std::int64_t>(),
                                            all.data_ptr<std::int64_t>() + all.numel());
      whole = group->all_gather(whole.movedim(dims[i], 0), sizes).movedim(0, dims[i]);
    }
  }
  if (whole.sizes() != of_one_rank.sizes() || !at::allclose(whole, of_one_rank, 1e-11, 1e-12))
    found += "not what one rank has";
  return found.empty() ? "" : to_string(L) + ": " + found;
}

}  // namespace moesh
