#include "moesh/spmd/raw.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/turns.h"
#include "moesh/spmd/attach.h"
#include "moesh/spmd/rows.h"
#include "moesh/types/token.h"

namespace moesh::raw {
namespace {

// The part of each rank along the dimension. `x` is this rank's part, or the whole.
std::vector<std::int64_t> resolve(const SplitDim& along, const at::Tensor& x, bool is_part,
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
              "; pass SplitDim{dim, total} or SplitDim{.dim, .sizes} with the true sizes");
  return sizes;
}

// The sizes of rows joined from several ranks, or cut.
auto with_rows(std::int64_t dim, std::int64_t num_rows) {
  return [=](at::IntArrayRef sizes) {
    auto out = sizes.vec();
    out[static_cast<size_t>(dim)] = num_rows;
    return out;
  };
}

Tensors detached(const Tensors& xs) {
  Tensors values;
  for (const auto& x : xs) values.push_back(x.detach());
  return values;
}

std::int64_t start_of(const std::vector<std::int64_t>& sizes, int rank) {
  return std::accumulate(sizes.begin(), sizes.begin() + rank, std::int64_t{0});
}

// The message is the result.
SentStep whole(comm::Handle message) {
  return {std::move(message), [](const at::Tensor& t) { return Tensors{t}; }};
}
SentStep ready(const at::Tensor& x) { return whole(comm::Handle(x)); }
// The collective joins or cuts rows: its message has `dim` first.
SentStep along_rows(comm::Handle message, std::int64_t dim) {
  return {std::move(message), [dim](const at::Tensor& t) { return Tensors{t.movedim(0, dim)}; }};
}

// Sends the codes, and gives what stands for those that come.
Begin in_code(Begin begin, std::shared_ptr<Codes> codes) {
  return [begin = std::move(begin), codes = std::move(codes)](const Tensors& xs) {
    Tensors message = xs;
    for (std::size_t i = 0; i < xs.size(); ++i)
      if (codes->words[i].defined()) message[i] = codes->words[i];
    SentStep sent = begin(message);
    sent.results = [results = std::move(sent.results), codes,
                    like = no_rows_of(xs)](const at::Tensor& came) {
      Tensors all = results(came);
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (!codes->words[i].defined()) continue;
        auto sizes = like[i].sizes().vec();
        sizes[0] = all[i].size(0);
        codes->words[i] = std::exchange(all[i], stands_for(sizes, like[i].options()));
      }
      return all;
    };
    return sent;
  };
}

// Encodes, sends, and decodes.
Begin by_codec(Begin begin, Codec codec) {
  return [begin = std::move(begin), codec = std::move(codec)](const Tensors& xs) {
    Tensors message;
    for (const at::Tensor& x : xs) message.push_back(codec->encode(x));
    SentStep sent = begin(message);
    sent.results = [results = std::move(sent.results), codec,
                    like = no_rows_of(xs)](const at::Tensor& came) {
      Tensors all = results(came);
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = codec->decode(all[i], like[i]);
      return all;
    };
    return sent;
  };
}

}  // namespace

MaybeAdjointPair in_code(MaybeAdjointPair pair, const std::shared_ptr<Codes>& codes,
                         const Codec& back) {
  if (!pair) return pair;
  if (std::ranges::any_of(codes->words, [](const at::Tensor& w) { return w.defined(); }))
    pair->step = in_code(std::move(pair->step), codes);
  if (back) pair->adjoint = by_codec(std::move(pair->adjoint), back);
  return pair;
}

SentStep begin(Step step, const at::Tensor& x, comm::Group& group, std::int64_t dim,
               const std::vector<std::int64_t>& sizes) {
  const int rank = group.rank();
  switch (step) {
    case Step::identity: return ready(x);
    case Step::all_reduce: return whole(group.start_all_reduce(x));
    case Step::all_gather: return along_rows(group.start_all_gather(x.movedim(dim, 0), sizes), dim);
    case Step::reduce_scatter:
      return along_rows(group.start_reduce_scatter(x.movedim(dim, 0), sizes), dim);
    case Step::keep:
      return ready(x.narrow(dim, start_of(sizes, rank), sizes[static_cast<size_t>(rank)]));
    case Step::pad: {
      auto shape = x.sizes().vec();
      shape[static_cast<size_t>(dim)] =
          std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
      at::Tensor out = at::zeros(shape, x.options());
      out.narrow(dim, start_of(sizes, rank), x.size(dim)).copy_(x);
      return ready(out);
    }
  }
  throw Error(ErrorKind::internal, "unknown step");
}

MaybeAdjointPair move(const at::Tensor& x, Axes axes, Place from, Place to, const SplitDim& along,
                      const char* what) {
  const auto group = current_mesh().group(axes);
  const bool is_cut = varies(from) || varies(to);
  SplitDim normal = along;
  if (is_cut) normal.dim = at::maybe_wrap_dim(along.dim, x.dim());
  const bool holds_tokens = normal.dim < (x.dim() >= 3 ? 2 : 1);
  MOESH_CHECK(holds_tokens || (from != Place::T && to != Place::T), ErrorKind::config, what,
              " of tokens (T on ", to_string(axes), ") along dimension ", normal.dim,
              " of a tensor ", x.sizes(),
              ", which holds features; tokens are dimension 0 of [N, D], 0 and 1 of [B, L, D]");
  if (group->size() == 1) return std::nullopt;
  const auto sizes =
      is_cut ? resolve(normal, x, varies(from), *group, what) : std::vector<std::int64_t>();
  // `place` is that of what the step takes.
  const auto begins = [group, dim = normal.dim, sizes, what, axes](Step step, Place place,
                                                                   const char* value) -> Begin {
    return [=](const Tensors& xs) {
      if (is_whole(place))
        group->expect_same(xs[0], detail::concat(value, " of ", what, " on ", to_string(axes)));
      return begin(step, xs[0], *group, dim, sizes);
    };
  };
  const auto total = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  AdjointPair pair{.step = begins(step(from, to), from, "input"),
                   .adjoint = begins(backward_step(from, to), adjoint(to), "gradient"),
                   .sizes = [](at::IntArrayRef same) { return same.vec(); }};
  if (is_cut)
    pair.sizes =
        with_rows(normal.dim, varies(from) ? total : sizes[static_cast<size_t>(group->rank())]);
  return pair;
}

MaybeAdjointPair move_rows(const at::Tensor& first, Axes axes,
                           const std::vector<std::int64_t>& send,
                           const std::vector<std::int64_t>& recv) {
  const auto group = current_mesh().group(axes);
  if (group->size() == 1) {
    group->all_to_all(first.detach(), send, recv);  // looks whether the numbers fit
    return std::nullopt;
  }
  const auto begins = [group](const auto& to, const auto& from) -> Begin {
    return [=](const Tensors& rows) { return send_rows(*group, rows, to, from); };
  };
  return AdjointPair{
      .step = begins(send, recv),
      .adjoint = begins(recv, send),
      .sizes = with_rows(0, std::accumulate(recv.begin(), recv.end(), std::int64_t{0}))};
}

SentStep AdjointPair::begin(const Tensors& xs) const {
  if (!is_not_computed(xs[0])) return step(detached(xs));
  MOESH_CHECK(xs.size() == 1, "a message of ", xs.size(), " tensors whose first is not computed");
  return ready(not_computed(sizes(xs[0].sizes()), xs[0]));
}

Tensors run_pair(const Tensors& xs, const MaybeAdjointPair& pair) {
  if (!pair) return xs;
  return attach_all(xs, pair->begin(xs).wait(), [adjoint = pair->adjoint](const Tensors& grads) {
    return adjoint(grads).wait();
  });
}

StartedStep::StartedStep(Tensors xs, const MaybeAdjointPair& pair) : xs_(std::move(xs)) {
  if (!pair) return;
  sent_.emplace(pair->begin(xs_));
  Tensors with_gradient;
  for (const auto& x : xs_)
    if (at::GradMode::is_enabled() && x.requires_grad()) with_gradient.push_back(x);
  if (with_gradient.empty()) return;
  backward_ = std::make_shared<Backward>();
  backward_->begin = pair->adjoint;
  under_way_ = attach_many(with_gradient, {at::empty({0}, with_gradient[0].options())},
                           [backward = backward_](const Tensors&) {
                             MOESH_CHECK(backward->sent, "backward awaits what it has not begun");
                             next_turn();
                             Tensors grads = backward->sent->wait();
                             backward->sent.reset();
                             return grads;
                           })[0];
}

Tensors StartedStep::wait() {
  MOESH_CHECK(!std::exchange(is_awaited_, true),
              "what was started is awaited twice; keep what the first wait returned");
  const Tensors xs = std::move(xs_);
  if (!sent_) return xs;
  if (!is_not_computed(xs[0])) next_turn();
  Tensors outs = sent_->wait();
  sent_.reset();
  if (!backward_) return outs;
  std::vector<std::size_t> places;
  Tensors values;
  for (std::size_t i = 0; i < xs.size(); ++i)
    if (xs[i].requires_grad()) places.push_back(i), values.push_back(outs[i]);
  const auto attached = attach_many(
      {under_way_}, values,
      [backward = backward_, none = under_way_.detach()](const Tensors& grads) -> Tensors {
        backward->sent.emplace(backward->begin(grads));
        return {none};
      });
  for (std::size_t k = 0; k < places.size(); ++k) outs[places[k]] = attached[k];
  return outs;
}

at::Tensor run(Step step, const at::Tensor& x, comm::Group& group, std::int64_t dim,
               const std::vector<std::int64_t>& sizes) {
  return begin(step, x, group, dim, sizes).wait()[0];
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

}  // namespace moesh::raw
