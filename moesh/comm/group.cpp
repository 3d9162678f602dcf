#include "moesh/comm/group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <numeric>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/observers.h"

namespace moesh::comm {

struct ThreadObservers {
  std::vector<Observer*> by{&flight::of_thread()};  // the flight recorder is always there
  int num_pauses = 0;
};

namespace {

struct ObserversByThread {
  ThreadObservers own;
  ThreadObservers* used = &own;  // or those of another thread of this rank
};
ObserversByThread& of_thread() {
  thread_local ObserversByThread mine;  // a rank is a thread, and a collective knows only that
  return mine;
}

}  // namespace

ThreadObservers& thread_observers() { return *of_thread().used; }
ScopedValue<ThreadObservers*> use_observers_of(ThreadObservers& other) {
  return {of_thread().used, &other};
}

namespace {

void tell(void (Observer::*event)(std::int64_t), std::int64_t number) {
  for (Observer* observer : thread_observers().by) (observer->*event)(number);
}

bool is_supported(at::ScalarType t) {
  return t == at::kDouble || t == at::kFloat || t == at::kBFloat16 || t == at::kLong ||
         t == at::kInt || t == at::kBool;
}

Handle in_progress(std::unique_ptr<Work> work, std::int64_t number) {
  tell(&Observer::started, number);
  return Handle(std::move(work), number);
}

at::Tensor wait_for(Work& work, std::int64_t number) {
  tell(&Observer::waits, number);
  at::Tensor value = work.wait();
  tell(&Observer::ended, number);
  return value;
}

// A group of one has nothing to send: the base class answers everything.
std::shared_ptr<Group> one_rank(const std::string& name, int world_rank) {
  return fake_group(name, 0, {world_rank});
}

}  // namespace

const char* to_string(Collective op) {
  switch (op) {
    case Collective::all_reduce: return "all_reduce";
    case Collective::all_gather: return "all_gather";
    case Collective::reduce_scatter: return "reduce_scatter";
    case Collective::all_to_all: return "all_to_all";
    case Collective::broadcast: return "broadcast";
    case Collective::barrier: return "barrier";
    case Collective::split: return "split";
    case Collective::send: return "send";
    case Collective::recv: return "recv";
  }
  return "unknown";
}

const char* to_string(ReduceOp op) {
  return op == ReduceOp::sum ? "sum" : op == ReduceOp::max ? "max" : "min";
}

Handle::~Handle() {
  if (!work_ || std::uncaught_exceptions() > num_exceptions_) return;
  try {
    wait_for(*work_, number_);
  } catch (const std::exception& e) {
    log_warn("a collective whose handle was dropped failed: ", e.what());
  }
}

at::Tensor Handle::wait() {
  if (auto work = std::move(work_)) value_ = wait_for(*work, number_);
  return value_;
}

std::int64_t Operation::own_bytes() const {
  if (op != Collective::reduce_scatter && op != Collective::all_to_all) return 0;
  const std::int64_t total = x->size(0), own = (*rows)[static_cast<size_t>(group.rank())];
  return total == 0 ? 0 : bytes / total * own;
}

ThreadObserver::ThreadObserver() { thread_observers().by.push_back(this); }
ThreadObserver::~ThreadObserver() { std::erase(thread_observers().by, this); }

ObserverPause::ObserverPause() { ++thread_observers().num_pauses; }
ObserverPause::~ObserverPause() { --thread_observers().num_pauses; }

Group::Group(std::string name, int rank, std::vector<int> members)
    : name_(std::move(name)),
      rank_(rank),
      members_(std::move(members)),
      num_sent_(members_.size()),
      num_received_(members_.size()) {
  MOESH_CHECK(rank >= 0 && rank < size(), "rank ", rank, " of a group of ", size());
}

std::vector<int> Group::world_ranks(const std::vector<int>& ranks) const {
  std::vector<int> world;
  world.reserve(ranks.size());
  for (int r : ranks) world.push_back(members_[static_cast<size_t>(r)]);
  return world;
}

void Group::check(Collective op, const at::Tensor& x) const {
  MOESH_CHECK(x.defined(), ErrorKind::comm, to_string(op), " on group '", name_,
              "': the tensor is undefined");
  check_kind(op, x.scalar_type(), x.dim());
}

void Group::check_kind(Collective op, at::ScalarType dtype, std::int64_t num_dims) const {
  MOESH_CHECK(is_supported(dtype), ErrorKind::comm, to_string(op), " on group '", name_,
              "': dtype ", c10::getDtypeNames(dtype).first,
              " is not supported; use float64, float32, bfloat16, int64, int32 or bool");
  MOESH_CHECK(num_dims <= 8, ErrorKind::comm, to_string(op), " on group '", name_, "': ", num_dims,
              " dimensions; at most 8 are supported, so flatten some");
}

void Group::check_reduce(Collective op, const at::Tensor& x, ReduceOp reduce) const {
  check(op, x);
  MOESH_CHECK(reduce != ReduceOp::sum || x.scalar_type() != at::kBool, ErrorKind::comm,
              to_string(op), " on group '", name_,
              "': a sum of bool is not defined; use max (any) or min (all), or convert to int64");
}

Rows Group::fill(Collective op, Rows rows, std::int64_t total, const char* what) const {
  const auto n = static_cast<std::int64_t>(size());
  if (rows.empty()) {
    MOESH_CHECK(total % n == 0, ErrorKind::comm, to_string(op), " on group '", name_, "': ", total,
                " rows are not divisible by ", n, " ranks; pass the rows of each rank");
    return Rows(static_cast<size_t>(n), total / n);
  }
  MOESH_CHECK(static_cast<std::int64_t>(rows.size()) == n, ErrorKind::comm, to_string(op),
              " on group '", name_, "': ", what, " lists ", rows.size(),
              " ranks and the group has ", n);
  for (auto r : rows)
    MOESH_CHECK(r >= 0, ErrorKind::comm, to_string(op), " on group '", name_, "': ", what, " ",
                rows, " has a negative entry");
  MOESH_CHECK(std::accumulate(rows.begin(), rows.end(), std::int64_t{0}) == total, ErrorKind::comm,
              to_string(op), " on group '", name_, "': ", what, " ", rows,
              " does not add up to the ", total, " rows of the tensor");
  return rows;
}

std::int64_t Group::call(Operation operation) {
  static std::atomic<std::int64_t> count = 0;
  operation.number = count.fetch_add(1, std::memory_order_relaxed);
  for (Observer* observer : thread_observers().by)
    if (thread_observers().num_pauses == 0 || observer->sees_all()) observer->called(operation);
  for (const auto& observer : observers_) observer->called(operation);
  return operation.number;
}

std::int64_t Group::call(Collective op, const at::Tensor& x, const Rows* rows, const Rows* recv,
                         ReduceOp reduce, int root) {
  return call({.group = *this,
               .op = op,
               .bytes = static_cast<std::int64_t>(x.nbytes()),
               .ranks = members_,
               .x = &x,
               .rows = rows,
               .recv = recv,
               .reduce = reduce,
               .root = root});
}

std::shared_ptr<Group> Group::observed(std::shared_ptr<Group> group) const {
  if (group && group->size() > 1)
    for (const auto& observer : observers_) group->add(observer->for_new_group());
  return group;
}

void Group::expect_same(const at::Tensor& x, std::string_view what) {
  if (size() == 1) return;
  for (const auto& observer : observers_) observer->expect_same(*this, x, what);
}

std::shared_ptr<Group> Group::background(const std::string& name) {
  auto group = do_background(name);
  return group->observers_.empty() ? observed(std::move(group)) : group;
}

Handle Group::start_all_reduce(const at::Tensor& x, ReduceOp op) {
  check_reduce(Collective::all_reduce, x, op);
  if (size() == 1) return Handle(x);
  const auto number = call(Collective::all_reduce, x, nullptr, nullptr, op);
  return in_progress(do_all_reduce(x.contiguous(), op), number);
}

Handle Group::start_all_gather(const at::Tensor& x, Rows rows) {
  check(Collective::all_gather, x);
  MOESH_CHECK(x.dim() >= 1, ErrorKind::comm, "all_gather on group '", name_,
              "': a scalar has no rows; use x.reshape({1})");
  if (rows.empty()) rows.assign(static_cast<size_t>(size()), x.size(0));
  const auto total = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  rows = fill(Collective::all_gather, std::move(rows), total, "rows");
  MOESH_CHECK(rows[static_cast<size_t>(rank_)] == x.size(0), ErrorKind::comm,
              "all_gather on group '", name_, "': rank ", rank_, " holds ", x.size(0),
              " rows and rows ", rows, " says ", rows[static_cast<size_t>(rank_)]);
  if (size() == 1) return Handle(x);
  const auto number = call(Collective::all_gather, x, &rows);
  return in_progress(do_all_gather(x.contiguous(), rows), number);
}

Handle Group::start_reduce_scatter(const at::Tensor& x, Rows rows, ReduceOp op) {
  check_reduce(Collective::reduce_scatter, x, op);
  MOESH_CHECK(x.dim() >= 1, ErrorKind::comm, "reduce_scatter on group '", name_,
              "': a scalar has no rows; use all_reduce");
  rows = fill(Collective::reduce_scatter, std::move(rows), x.size(0), "rows");
  if (size() == 1) return Handle(x);
  const auto number = call(Collective::reduce_scatter, x, &rows, nullptr, op);
  return in_progress(do_reduce_scatter(x.contiguous(), rows, op), number);
}

Handle Group::start_all_to_all(const at::Tensor& x, Rows send, Rows recv) {
  check(Collective::all_to_all, x);
  MOESH_CHECK(x.dim() >= 1, ErrorKind::comm, "all_to_all on group '", name_,
              "': a scalar has no rows");
  send = fill(Collective::all_to_all, std::move(send), x.size(0), "send");
  if (recv.empty()) recv = send;
  recv = fill(Collective::all_to_all, recv,
              std::accumulate(recv.begin(), recv.end(), std::int64_t{0}), "recv");
  const auto self = static_cast<size_t>(rank_);
  MOESH_CHECK(send[self] == recv[self], ErrorKind::comm, "all_to_all on group '", name_, "': rank ",
              rank_, " keeps ", send[self], " rows and expects ", recv[self], " from itself");
  if (size() == 1) return Handle(x);
  const auto number = call(Collective::all_to_all, x, &send, &recv);
  return in_progress(do_all_to_all(x.contiguous(), send, recv), number);
}

Handle Group::start_broadcast(const at::Tensor& x, int root) {
  check(Collective::broadcast, x);
  MOESH_CHECK(root >= 0 && root < size(), ErrorKind::comm, "broadcast on group '", name_,
              "' from rank ", root, "; the group has ranks 0 to ", size() - 1);
  if (size() == 1) return Handle(x);
  const auto number = call(Collective::broadcast, x, nullptr, nullptr, ReduceOp::sum, root);
  return in_progress(do_broadcast(x.contiguous(), root), number);
}

void Group::barrier() {
  if (size() == 1) return;
  const auto number = call({.group = *this, .op = Collective::barrier, .ranks = members_});
  do_barrier();
  tell(&Observer::ended, number);
}

void Group::check_channel(Collective op, const Channel& c) const {
  for (const int r : {c.from, c.to})
    MOESH_CHECK(r >= 0 && r < size(), ErrorKind::comm, to_string(op), " on group '", name_,
                "' from rank ", c.from, " to rank ", c.to, "; the group has ranks 0 to ",
                size() - 1);
  MOESH_CHECK(c.from != c.to, ErrorKind::comm, to_string(op), " on group '", name_, "': rank ",
              c.from, " would send to itself; keep the tensor instead");
}

void Group::check_open(Collective op, const Channel& c) const {
  check_channel(op, c);
  MOESH_CHECK(channels_.contains(c), ErrorKind::comm, to_string(op), " on group '", name_,
              "': the channel from rank ", c.from, " to rank ", c.to,
              " is not open; every rank calls open_channels with it before the first message");
}

void Group::open_channels(const std::vector<Channel>& channels) {
  std::vector<Channel> fresh;
  std::vector<std::int64_t> words;
  for (const Channel& c : channels) {
    check_channel(Collective::send, c);
    if (channels_.insert(c).second) fresh.push_back(c);
    words.insert(words.end(), {c.from, c.to});
  }
  if (size() == 1) return;
  const ObserverPause quiet;
  expect_same(at::tensor(words, at::kLong).to(control_device()), "the list of channels");
  if (!fresh.empty()) do_open_channels(fresh);
}

Handle Group::start_send(const at::Tensor& x, int to, std::int64_t label) {
  check(Collective::send, x);
  check_open(Collective::send, {rank_, to});
  const auto ranks = world_ranks({rank_, to});
  const auto number = call({.group = *this,
                            .op = Collective::send,
                            .bytes = static_cast<std::int64_t>(x.nbytes()),
                            .ranks = ranks,
                            .x = &x});
  return in_progress(
      do_send(x.detach().contiguous(),
              {.peer = to, .number = num_sent_[static_cast<size_t>(to)]++, .label = label}),
      number);
}

Handle Group::start_recv(at::IntArrayRef sizes, const at::TensorOptions& options, int from,
                         std::int64_t label) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  check_kind(Collective::recv, dtype, static_cast<std::int64_t>(sizes.size()));
  check_open(Collective::recv, {from, rank_});
  auto bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  for (const auto n : sizes) {
    MOESH_CHECK(n >= 0, ErrorKind::comm, "recv on group '", name_, "': sizes ", sizes,
                " have a negative entry");
    bytes *= n;
  }
  const auto ranks = world_ranks({from, rank_});
  const auto number =
      call({.group = *this, .op = Collective::recv, .bytes = bytes, .ranks = ranks});
  return in_progress(
      do_recv(sizes, options.requires_grad(std::nullopt),
              {.peer = from, .number = num_received_[static_cast<size_t>(from)]++, .label = label}),
      number);
}

std::shared_ptr<Group> Group::split(int color, int key, const std::string& name) {
  std::vector<std::pair<int, int>> asked{{color, key}};
  if (size() > 1) {
    const at::Tensor mine =
        at::tensor({std::int64_t{color}, std::int64_t{key}}, at::kLong).reshape({1, 2});
    const at::Tensor all = all_gather(mine.to(control_device())).cpu();
    const auto* p = all.const_data_ptr<std::int64_t>();
    asked.clear();
    for (int r = 0; r < size(); ++r)
      asked.emplace_back(static_cast<int>(p[2 * r]), static_cast<int>(p[2 * r + 1]));
  }
  std::map<int, std::vector<int>> colors;  // in the same order on every rank
  for (int r = 0; r < size(); ++r)
    if (asked[static_cast<size_t>(r)].first >= 0)
      colors[asked[static_cast<size_t>(r)].first].push_back(r);
  if (color < 0) {
    if (size() > 1) do_split({}, -1, -1, name);
    return nullptr;
  }
  auto& members = colors[color];
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return asked[static_cast<size_t>(a)].second < asked[static_cast<size_t>(b)].second;
  });
  const int rank =
      static_cast<int>(std::find(members.begin(), members.end(), rank_) - members.begin());
  const int index = static_cast<int>(std::distance(colors.begin(), colors.find(color)));
  if (size() == 1) return one_rank(name, members_[0]);
  auto group = do_split(members, rank, index, name);
  if (members.size() == 1) return one_rank(name, members_[static_cast<size_t>(rank_)]);
  return observed(std::move(group));
}

std::shared_ptr<Group> solo_group(const std::string& name) { return one_rank(name, 0); }

}  // namespace moesh::comm
