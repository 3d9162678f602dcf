#include "moesh/comm/host_group.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <numeric>

#include "moesh/base/error.h"
#include "moesh/base/timeline.h"
#include "moesh/types/token.h"

namespace moesh::comm {
namespace {

// Up to here all_reduce is one exchange in which every rank sums everything; and on the host a rank
// copies its input for its peers and does not wait until they have read it.
constexpr std::int64_t kSmallBytes = 16 * 1024;

bool is_small(const at::Tensor& x) { return static_cast<std::int64_t>(x.nbytes()) <= kSmallBytes; }
// On a device peers may only have queued their reading of a copy when the last of them lets go of
// it.
bool is_copied(const at::Tensor& x) { return is_small(x) && x.device().is_cpu(); }

std::vector<std::int64_t> sizes(const std::vector<Span>& spans) {
  std::vector<std::int64_t> n;
  n.reserve(spans.size());
  for (const auto& b : spans) n.push_back(b.numel);
  return n;
}

// The memory that the peers read: x, or a copy of it that will not be written.
at::Tensor for_peers(const at::Tensor& x) {
  if (!is_copied(x)) return x;
  const at::Tensor own = at::empty(x.sizes(), x.options());
  copy(whole(own), whole(x), x.options());
  return own;
}

// Own span first, then round the group: ranks do not all read the same peer at once.
void copy_all(const std::vector<Span>& into, const std::vector<Span>& from, int rank,
              const at::TensorOptions& options) {
  for (size_t k = 0; k < from.size(); ++k) {
    const size_t j = (static_cast<size_t>(rank) + k) % from.size();
    copy(into[j], from[j], options);
  }
}

// all_gather, all_to_all, broadcast: each span that comes has its place in the result.
class CopyWork final : public Work {
 public:
  CopyWork(std::unique_ptr<Exchange> exchange, at::Tensor out, std::vector<Span> into, int rank)
      : exchange_(std::move(exchange)), out_(std::move(out)), into_(std::move(into)), rank_(rank) {}
  at::Tensor wait() override {
    exchange_->run([into = into_, from = exchange_->receive(), rank = rank_, out = out_] {
      copy_all(into, from, rank, out.options());
    });
    exchange_->close();
    return out_;
  }

 private:
  std::unique_ptr<Exchange> exchange_;
  at::Tensor out_;
  std::vector<Span> into_;
  int rank_;
};

// reduce_scatter and the small all_reduce: the spans that come are summed.
class FoldWork final : public Work {
 public:
  FoldWork(std::unique_ptr<Exchange> exchange, at::Tensor out, ReduceOp op)
      : exchange_(std::move(exchange)), out_(std::move(out)), op_(op) {}
  at::Tensor wait() override {
    const InSection reducing(Section::reduce);
    exchange_->run([op = op_, from = exchange_->receive(), out = out_] {
      fold(op, from, whole(out), out.options());
    });
    exchange_->close();
    return out_;
  }

 private:
  std::unique_ptr<Exchange> exchange_;
  at::Tensor out_;
  ReduceOp op_;
};

}  // namespace

std::vector<Span> parts(const at::Tensor& x, const Rows& rows) {
  std::int64_t inner = 1;
  for (std::int64_t d = 1; d < x.dim(); ++d) inner *= x.size(d);
  auto* next = static_cast<std::byte*>(x.data_ptr());
  std::vector<Span> spans;
  spans.reserve(rows.size());
  for (const auto r : rows) {
    spans.push_back({next, r * inner});
    if (next) next += r * inner * static_cast<std::int64_t>(x.element_size());
  }
  return spans;
}

std::int64_t total(const Rows& rows) {
  return std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
}

std::vector<std::int64_t> sizes_with(const at::Tensor& x, std::int64_t rows) {
  auto sizes = x.sizes().vec();
  sizes[0] = rows;
  return sizes;
}

// A large all_reduce: rank r sums the r-th part of everyone, then the parts are gathered.
class AllReduceWork final : public Work {
 public:
  AllReduceWork(HostGroup& group, Call call, const at::Tensor& x, ReduceOp op)
      : group_(group), call_(call), out_(empty_result(x.sizes(), x.options())), op_(op) {
    const Pieces cut{x.numel(), group.size()};
    into_ = parts(out_.flatten(), cut.lengths());
    auto send = parts(x.detach().flatten(), cut.lengths());
    const std::vector<std::int64_t> recv(send.size(), cut.length(group.rank()));
    // No rank posts the second phase before it has read the first, so its end is not awaited.
    exchange_ = group.post({.call = call,
                            .send = std::move(send),
                            .recv = recv,
                            .into = {},
                            .keep = {x},
                            .options = x.options(),
                            .wait_for_readers = false});
  }
  at::Tensor wait() override {
    const InSection reducing(Section::reduce);
    const auto mine = into_[static_cast<size_t>(group_.rank())];
    exchange_->run([op = op_, from = exchange_->receive(), mine, out = out_] {
      fold(op, from, mine, out.options());
    });
    exchange_->close();
    call_.phase = 1;
    auto gather = group_.post({.call = call_,
                               .send = std::vector<Span>(into_.size(), mine),
                               .recv = sizes(into_),
                               .into = into_,
                               .keep = {out_},
                               .options = out_.options()});
    gather->run([into = into_, from = gather->receive(), rank = group_.rank(), out = out_] {
      copy_all(into, from, rank, out.options());
    });
    gather->close();
    return out_;
  }

 private:
  HostGroup& group_;
  Call call_;
  at::Tensor out_;
  ReduceOp op_;
  std::vector<Span> into_;
  std::unique_ptr<Exchange> exchange_;
};

Call Call::of(Collective op, std::int64_t sequence, const at::Tensor& x, ReduceOp reduce,
              int root) {
  Call c = message(op, sequence, x.scalar_type(), x.sizes(), root, 0);
  c.reduce = reduce;
  return c;
}

Call Call::message(Collective op, std::int64_t number, at::ScalarType dtype, at::IntArrayRef sizes,
                   int peer, std::int64_t label) {
  Call c;
  c.sequence = number;
  c.op = op;
  c.dtype = static_cast<std::int8_t>(dtype);
  c.num_dims = static_cast<std::int8_t>(sizes.size());
  c.root = static_cast<std::int16_t>(peer);
  std::copy(sizes.begin(), sizes.end(), c.dims);
  c.rows = static_cast<std::uint64_t>(label);
  return c;
}

Call Call::with(const Rows& list) const {
  Call c = *this;
  c.rows = 0xcbf29ce484222325;
  for (auto r : list) {
    c.rows = (c.rows ^ static_cast<std::uint64_t>(r)) * 0x9e3779b97f4a7c15;
    c.rows ^= c.rows >> 29;
  }
  return c;
}

bool Call::agrees_with(const Call& o) const {
  if (sequence != o.sequence || phase != o.phase || op != o.op || reduce != o.reduce ||
      dtype != o.dtype || num_dims != o.num_dims || root != o.root || rows != o.rows)
    return false;
  const bool any_rows = op == Collective::all_gather || op == Collective::all_to_all;
  for (int d = any_rows ? 1 : 0; d < num_dims; ++d)
    if (dims[d] != o.dims[d]) return false;
  return true;
}

std::string Call::describe() const {
  if (op == Collective::barrier) return to_string(op);
  std::string text = std::string(to_string(op)) + "(";
  if (op == Collective::all_reduce || op == Collective::reduce_scatter)
    text += std::string(to_string(reduce)) + ", ";
  if (op == Collective::broadcast) text += "from rank " + std::to_string(root) + ", ";
  text += detail::concat(c10::getDtypeNames(static_cast<at::ScalarType>(dtype)).first, " ",
                         std::vector<std::int64_t>(dims, dims + num_dims));
  if (is_message())
    text += detail::concat(rows != 0 ? detail::concat(" with label ", rows) : "",
                           op == Collective::send ? " to rank " : " from rank ", root);
  return text + ")";
}

std::string Call::place(const std::string& group) const {
  return detail::concat(is_message() ? "message " : "operation ", sequence, " of group '", group,
                        "'");
}

std::string disagreement(const Call& send, const Call& recv, const std::string& group) {
  if (send.sequence == recv.sequence && send.dtype == recv.dtype && send.rows == recv.rows &&
      std::equal(send.dims, send.dims + send.num_dims, recv.dims, recv.dims + recv.num_dims))
    return {};
  return detail::concat(
      "rank ", recv.root, " called ", send.describe(), " and rank ", send.root, " called ",
      recv.describe(), " as ", recv.place(group),
      " between them. Both ranks must go through the messages of a channel in the "
      "same order, with the same sizes, dtype and label.");
}

std::string disagreement(const std::vector<Call>& calls, const std::vector<int>& world_ranks,
                         const std::string& group) {
  if (std::all_of(calls.begin(), calls.end(),
                  [&](const Call& c) { return c.agrees_with(calls[0]); }))
    return {};
  // The most common call is taken as right; on a tie, the one of the lowest rank.
  size_t best = 0, best_votes = 0;
  for (size_t i = 0; i < calls.size(); ++i) {
    size_t votes = 0;
    for (const auto& c : calls) votes += c.agrees_with(calls[i]);
    if (votes > best_votes) best = i, best_votes = votes;
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    if (calls[i].agrees_with(calls[best])) continue;
    Call same_rows = calls[i];
    same_rows.rows = calls[best].rows;
    if (same_rows.agrees_with(calls[best]))
      return detail::concat("rank ", world_ranks[i], " called ", calls[i].describe(),
                            " as operation ", calls[i].sequence, " of group '", group,
                            "' with other rows than rank ", world_ranks[best],
                            ". All ranks must pass the same rows of each rank.");
    return detail::concat(
        "rank ", world_ranks[i], " called ", calls[i].describe(), " as operation ",
        calls[i].sequence, " of group '", group, "', where rank ", world_ranks[best], " called ",
        calls[best].describe(), " as operation ", calls[best].sequence,
        ". All ranks of a group must make the same calls in the same order, on tensors that fit.");
  }
  return {};
}

Call HostGroup::call_of(Collective op, at::ScalarType dtype, at::IntArrayRef sizes,
                        const Message& m) const {
  return Call::message(op, m.number, dtype, sizes, members()[static_cast<size_t>(m.peer)], m.label);
}

std::unique_ptr<Work> HostGroup::do_all_reduce(const at::Tensor& x, ReduceOp op) {
  const Call call = Call::of(Collective::all_reduce, next_sequence(), x, op);
  if (!is_small(x)) return std::make_unique<AllReduceWork>(*this, call, x, op);
  const at::Tensor mine = for_peers(x);
  return start_fold(call, std::vector<Span>(static_cast<size_t>(size()), whole(mine)), mine,
                    at::empty(x.sizes(), x.options()), op);
}

std::unique_ptr<Work> HostGroup::start_fold(const Call& call, std::vector<Span> send,
                                            const at::Tensor& mine, const at::Tensor& out,
                                            ReduceOp op) {
  const std::vector<std::int64_t> recv(send.size(), out.numel());
  auto exchange = post({.call = call,
                        .send = std::move(send),
                        .recv = recv,
                        .into = {},
                        .keep = {mine},
                        .options = out.options(),
                        .wait_for_readers = !is_copied(mine)});
  return std::make_unique<FoldWork>(std::move(exchange), out, op);
}

std::unique_ptr<Work> HostGroup::start_copy(const Call& call, std::vector<Span> send,
                                            std::vector<Span> into, const at::Tensor& mine,
                                            const at::Tensor& out) {
  auto exchange = post({.call = call,
                        .send = std::move(send),
                        .recv = sizes(into),
                        .into = into,
                        .keep = {mine, out},
                        .options = out.options(),
                        .wait_for_readers = mine.defined() && !is_copied(mine)});
  return std::make_unique<CopyWork>(std::move(exchange), out, std::move(into), rank());
}

std::unique_ptr<Work> HostGroup::do_all_gather(const at::Tensor& x, const Rows& rows) {
  const Call call = Call::of(Collective::all_gather, next_sequence(), x).with(rows);
  const at::Tensor out = empty_result(sizes_with(x, total(rows)), x.options());
  const at::Tensor mine = for_peers(x);
  return start_copy(call, std::vector<Span>(rows.size(), whole(mine)), parts(out, rows), mine, out);
}

std::unique_ptr<Work> HostGroup::do_reduce_scatter(const at::Tensor& x, const Rows& rows,
                                                   ReduceOp op) {
  const Call call = Call::of(Collective::reduce_scatter, next_sequence(), x, op).with(rows);
  const at::Tensor out =
      empty_result(sizes_with(x, rows[static_cast<size_t>(rank())]), x.options());
  const at::Tensor mine = for_peers(x);
  return start_fold(call, parts(mine, rows), mine, out, op);
}

std::unique_ptr<Work> HostGroup::do_all_to_all(const at::Tensor& x, const Rows& send,
                                               const Rows& recv) {
  const Call call = Call::of(Collective::all_to_all, next_sequence(), x);
  const at::Tensor out = empty_result(sizes_with(x, total(recv)), x.options());
  const at::Tensor mine = for_peers(x);
  return start_copy(call, parts(mine, send), parts(out, recv), mine, out);
}

std::unique_ptr<Work> HostGroup::do_broadcast(const at::Tensor& x, int root) {
  const Call call = Call::of(Collective::broadcast, next_sequence(), x, ReduceOp::sum, root);
  const auto n = static_cast<size_t>(size());
  const bool is_root = rank() == root;
  const at::Tensor out = empty_result(x.sizes(), x.options());
  const at::Tensor mine = is_root ? for_peers(x) : at::Tensor();
  std::vector<Span> into(n);
  into[static_cast<size_t>(root)] = whole(out);
  return start_copy(call, std::vector<Span>(n, is_root ? whole(mine) : Span()), std::move(into),
                    mine, out);
}

void HostGroup::do_barrier() {
  const Call call = Call::message(Collective::barrier, next_sequence(), at::kByte, {}, 0, 0);
  const auto n = static_cast<size_t>(size());
  auto exchange = post({.call = call,
                        .send = std::vector<Span>(n),
                        .recv = std::vector<std::int64_t>(n, 0),
                        .into = {},
                        .keep = {},
                        .options = at::TensorOptions(at::kByte),
                        .wait_for_readers = false});
  exchange->receive();
  exchange->close();
}

}  // namespace moesh::comm
