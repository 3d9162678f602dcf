#include "moesh/spmd/raw.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <numeric>

#include "moesh/base/error.h"
#include "moesh/spmd/attach.h"
#include "moesh/spmd/rows.h"
#include "moesh/types/token.h"

namespace moesh::raw {
namespace {

// The part of each rank along the dimension. `x` is this rank's part, or the whole.
std::vector<std::int64_t> resolve(const Along& along, const at::Tensor& x, bool is_part,
                                  const comm::Group& group, const char* what) {
  const std::int64_t n = group.size(), here = x.size(along.dim);
  std::vector<std::int64_t> sizes = along.sizes;
  if (sizes.empty() && along.total >= 0) sizes = Pieces{along.total, n}.lengths();
  if (sizes.empty())
    sizes = is_part ? std::vector<std::int64_t>(static_cast<size_t>(n), here)
                    : Pieces{here, n}.lengths();
  MOESH_CHECK(static_cast<std::int64_t>(sizes.size()) == n, ErrorKind::config, what,
              " along dimension ", along.dim, ": sizes ", sizes, " list ", sizes.size(),
              " ranks, and group '", group.name(), "' has ", n);
  const std::int64_t total = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  const std::int64_t mine = sizes[static_cast<size_t>(group.rank())];
  MOESH_CHECK(here == (is_part ? mine : total), ErrorKind::config, what, " along dimension ",
              along.dim, ": rank ", group.rank(), " of group '", group.name(), "' has size ", here,
              ", and the parts ", sizes, " want ", is_part ? mine : total,
              "; pass Along{dim, total} or Along{.dim, .sizes} with the true sizes");
  return sizes;
}

at::Tensor packed(const std::vector<at::Tensor>& xs) {
  std::vector<at::Tensor> values;
  for (const auto& x : xs) values.push_back(x.detach());
  return pack_rows(values);
}

std::int64_t start_of(const std::vector<std::int64_t>& sizes, int rank) {
  return std::accumulate(sizes.begin(), sizes.begin() + rank, std::int64_t{0});
}

}  // namespace

at::Tensor run(Step step, const at::Tensor& x, comm::Group& group, std::int64_t dim,
               const std::vector<std::int64_t>& sizes) {
  const int rank = group.rank();
  switch (step) {
    case Step::identity: return x;
    case Step::all_reduce: return group.all_reduce(x);
    case Step::all_gather: return group.all_gather(x.movedim(dim, 0), sizes).movedim(0, dim);
    case Step::reduce_scatter:
      return group.reduce_scatter(x.movedim(dim, 0), sizes).movedim(0, dim);
    case Step::keep: return x.narrow(dim, start_of(sizes, rank), sizes[static_cast<size_t>(rank)]);
    case Step::pad: {
      auto shape = x.sizes().vec();
      shape[static_cast<size_t>(dim)] =
          std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
      at::Tensor out = at::zeros(shape, x.options());
      out.narrow(dim, start_of(sizes, rank), x.size(dim)).copy_(x);
      return out;
    }
  }
  throw Error(ErrorKind::internal, "unknown step");
}

at::Tensor move(const at::Tensor& x, Axes axes, Place from, Place to, const Along& along,
                const char* what) {
  const auto group = current_mesh().group(axes);
  const Step forward = step(from, to), backward = backward_step(from, to);
  const bool is_cut = varies(from) || varies(to);
  Along normal = along;
  if (is_cut) normal.dim = at::maybe_wrap_dim(along.dim, x.dim());
  const bool holds_tokens = normal.dim < (x.dim() >= 3 ? 2 : 1);
  MOESH_CHECK(holds_tokens || (from != Place::T && to != Place::T), ErrorKind::config, what,
              " of tokens (T on ", to_string(axes), ") along dimension ", normal.dim,
              " of a tensor ", x.sizes(),
              ", which holds features; tokens are dimension 0 of [N, D], 0 and 1 of [B, L, D]");
  if (group->size() == 1) return x;
  const auto sizes =
      is_cut ? resolve(normal, x, varies(from), *group, what) : std::vector<std::int64_t>();
  const at::Tensor value = x.detach();
  if (is_whole(from))
    group->expect_same(value, detail::concat("input of ", what, " on ", to_string(axes)));
  const at::Tensor out = run(forward, value, *group, normal.dim, sizes);
  return attach(
      x, out, [group, backward, dim = normal.dim, sizes, to, what, axes](const at::Tensor& grad) {
        if (is_whole(adjoint(to)))
          group->expect_same(grad, detail::concat("gradient of ", what, " on ", to_string(axes)));
        return run(backward, grad, *group, dim, sizes);
      });
}

at::Tensor once(const at::Tensor& x, Axes axes, Place from) {
  const auto group = current_mesh().group(axes);
  if (group->size() == 1) return x;
  const bool is_first = group->rank() == 0;
  const at::Tensor value = x.detach();
  group->expect_same(value, detail::concat("input of once on ", to_string(axes)));
  const auto keep_first = [is_first](const at::Tensor& t) {
    return is_first ? t : at::zeros_like(t);
  };
  const auto adjoint = [keep_first, from](const at::Tensor& grad) {
    return from == Place::I ? grad : keep_first(grad);
  };
  return attach(x, keep_first(value), adjoint);
}

RowExchange::RowExchange(std::vector<at::Tensor> xs, Axes axes, std::vector<std::int64_t> send,
                         std::vector<std::int64_t> recv)
    : xs_(std::move(xs)),
      group_(current_mesh().group(axes)),
      send_(std::move(send)),
      recv_(std::move(recv)),
      handle_(group_->start_all_to_all(group_->size() == 1 ? xs_[0].detach() : packed(xs_), send_,
                                       recv_)) {}

std::vector<at::Tensor> RowExchange::wait() {
  if (group_->size() == 1) return xs_;
  return attach_all(
      xs_, unpack_rows(handle_.wait(), xs_),
      [group = group_, send = send_, recv = recv_](const std::vector<at::Tensor>& grads) {
        return unpack_rows(group->all_to_all(pack_rows(grads), recv, send), grads);
      });
}

}  // namespace moesh::raw
