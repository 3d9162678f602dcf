#include "moesh/spmd/raw.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <memory>
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

namespace {

// From this on, copying rows into a message and out of it takes longer than another message does.
constexpr std::int64_t kWideRow = 1024;

std::int64_t row_bytes(const at::Tensor& x) {
  std::int64_t n = x.element_size();
  for (auto size : x.sizes().slice(1)) n *= size;
  return n;
}

// The widest words of which each part has a whole number a row: copies move words, and groups know
// these dtypes.
at::ScalarType word_type(const std::vector<at::Tensor>& parts) {
  std::int64_t bytes = 8;
  for (const auto& p : parts) bytes = std::gcd(bytes, row_bytes(p));
  MOESH_CHECK(bytes >= 2, "rows of ", parts.size(), " tensors in one message: one of them has ",
              bytes, " byte in a row, and words have 2, 4 or 8");
  return bytes == 8 ? at::kLong : bytes == 4 ? at::kInt : at::kBFloat16;
}

}  // namespace

at::Tensor pack_rows(const std::vector<at::Tensor>& parts) {
  if (parts.size() == 1) return parts[0];
  const auto word = word_type(parts);
  const auto width = static_cast<std::int64_t>(c10::elementSize(word));
  std::vector<at::Tensor> columns;
  for (const auto& p : parts) {
    const std::int64_t n = row_bytes(p) / p.element_size();
    // Words want the strides of rows that lie side by side, and contiguous() leaves those of a
    // single row or column as they are.
    const at::Tensor rows = p.contiguous().as_strided({p.size(0), n}, {n, 1});
    const bool is_aligned = rows.storage_offset() * rows.element_size() % width == 0;
    columns.push_back((is_aligned ? rows : rows.clone()).view(word));
  }
  return at::cat(columns, 1);
}

std::vector<at::Tensor> unpack_rows(const at::Tensor& packed, const std::vector<at::Tensor>& like) {
  if (like.size() == 1) return {packed};
  std::vector<at::Tensor> parts;
  std::int64_t first = 0;
  for (const auto& l : like) {
    const std::int64_t width = row_bytes(l) / packed.element_size();
    auto shape = l.sizes().vec();
    shape[0] = packed.size(0);
    parts.push_back(packed.narrow(1, first, width)
                        .clone(at::MemoryFormat::Contiguous)
                        .view(l.scalar_type())
                        .view(shape));
    first += width;
  }
  return parts;
}

std::vector<at::Tensor> no_rows_of(const std::vector<at::Tensor>& parts) {
  std::vector<at::Tensor> none;
  for (const auto& p : parts) {
    auto shape = p.sizes().vec();
    shape[0] = 0;
    none.push_back(at::empty(shape, p.options()));
  }
  return none;
}

SentStep send_rows(comm::Group& group, const std::vector<at::Tensor>& parts,
                   const std::vector<std::int64_t>& send, const std::vector<std::int64_t>& recv) {
  // Shared: `results` is a function that may be copied, and a message is awaited once.
  const auto wide = std::make_shared<std::vector<comm::Handle>>();
  std::vector<at::Tensor> narrow;
  std::vector<bool> is_wide;
  for (const auto& p : parts) {
    is_wide.push_back(parts.size() > 1 && row_bytes(p) >= kWideRow);
    if (is_wide.back())
      wide->push_back(group.start_all_to_all(p, send, recv));
    else
      narrow.push_back(p);
  }
  const auto join = [wide, is_wide](std::vector<at::Tensor> others) {
    std::vector<at::Tensor> all;
    auto next = wide->begin();
    auto other = others.begin();
    for (const bool alone : is_wide) all.push_back(alone ? next++->wait() : *other++);
    return all;
  };
  if (narrow.empty())
    return {comm::Handle(at::Tensor()), [join](const at::Tensor&) { return join({}); }};
  return {group.start_all_to_all(pack_rows(narrow), send, recv),
          [join, like = no_rows_of(narrow)](const at::Tensor& t) {
            return join(unpack_rows(t, like));
          }};
}

MaybeAdjointPair gather_together(Axes axes, const std::vector<std::int64_t>& rows) {
  const auto group = current_mesh().group(axes);
  if (group->size() == 1) return std::nullopt;
  const auto gather = [group, rows](const Tensors& parts) -> SentStep {
    return {group->start_all_gather(pack_rows(parts), rows),
            [like = no_rows_of(parts)](const at::Tensor& t) { return unpack_rows(t, like); }};
  };
  const auto sum = [group, rows](const Tensors& grads) -> SentStep {
    const std::int64_t mine = rows[static_cast<size_t>(group->rank())], n = group->size();
    return {group->start_all_to_all(pack_rows(grads), rows,
                                    std::vector<std::int64_t>(rows.size(), mine)),
            [like = no_rows_of(grads), mine, n](const at::Tensor& message) {
              Tensors sums;
              for (const auto& t : unpack_rows(message, like)) {
                at::Tensor sum = t.narrow(0, 0, mine)
                                     .to(wide_dtype(t.scalar_type()), false,
                                         /*copy=*/true);
                for (std::int64_t r = 1; r < n; ++r) sum += t.narrow(0, r * mine, mine);
                sums.push_back(sum.to(t.scalar_type()));
              }
              return sums;
            }};
  };
  return AdjointPair{.step = gather, .adjoint = sum, .sizes = {}};
}

at::Tensor stands_for(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty({1}, options).expand(sizes);
}

at::Tensor begin_coded(const at::Tensor& x) {
  return attach(x, stands_for(x.sizes(), x.options()), [](const at::Tensor& g) { return g; });
}

at::Tensor end_coded(const at::Tensor& place, const at::Tensor& rows) {
  return attach(place, rows, [](const at::Tensor& g) { return g; });
}

at::Tensor map_coded(const at::Tensor& place, std::int64_t num_rows,
                     std::function<at::Tensor(const at::Tensor&)> adjoint) {
  auto sizes = place.sizes().vec();
  sizes[0] = num_rows;
  return attach(place, stands_for(sizes, place.options()), std::move(adjoint));
}

at::Tensor with_coded_gradient(const at::Tensor& x, const Codec& codec) {
  if (!codec) return x;
  return attach(x, x.detach(), [codec](const at::Tensor& gradient) {
    return codec->decode(codec->encode(gradient), gradient);
  });
}

}  // namespace moesh::raw
