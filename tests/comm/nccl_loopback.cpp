#include "nccl_loopback.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/comm/host_group.h"

namespace moesh::comm::loopback {
namespace {

// Runs functions one after another, in a thread of its own.
class Queue {
 public:
  Queue() : thread_([this] { work(); }) {}
  ~Queue() {
    {
      std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void push(std::function<void()> f) {
    {
      std::lock_guard lock(mutex_);
      waiting_.push_back(std::move(f));
    }
    changed_.notify_all();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ending_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      auto f = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      f();
      f = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  bool ending_ = false;
  std::thread thread_;
};

// A stream of the CPU: the current stream is the calling thread, which waits by blocking.
class HostStream final : public CommStream {
 public:
  void* handle() override { return this; }
  std::shared_ptr<StreamOrigin> here() override { return std::make_shared<StreamOrigin>(); }
  void follow(const StreamOrigin&) override {}
  void run(const std::function<void()>& f) override { queue_.push(f); }
  std::shared_ptr<Mark> mark(const StreamOrigin&) override { return mark(); }
  std::shared_ptr<Mark> mark() override {
    auto mark = std::make_shared<HostMark>();
    queue_.push([mark] { mark->reach(); });
    return mark;
  }

 private:
  class HostMark final : public Mark {
   public:
    bool done() const override {
      std::lock_guard lock(mutex_);
      return reached_;
    }
    void hold_current() override {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return reached_; });
    }
    void reach() {
      std::lock_guard lock(mutex_);
      reached_ = true;
      changed_.notify_all();
    }

   private:
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    bool reached_ = false;
  };

  Queue queue_;
};

// A stream of a device, which the table recognises by its address.
class LoopbackStream final : public DeviceStream {
 public:
  using DeviceStream::DeviceStream;
  void* handle() override { return static_cast<DeviceStream*>(this); }
};

enum class Kind { all_reduce, all_gather, reduce_scatter, broadcast, send, recv };

struct Op {
  Kind kind;
  const void* in = nullptr;
  void* out = nullptr;
  std::int64_t count = 0;
  NcclType type = NcclType::uint8;
  NcclReduce reduce = NcclReduce::sum;
  int peer = 0;  // or the root

  bool fits(const Op& o) const {
    return kind == o.kind && count == o.count && type == o.type && reduce == o.reduce &&
           peer == o.peer;
  }
};

// One collective: everyone comes, everyone reads, everyone leaves.
struct Meeting {
  std::vector<std::optional<Op>> ops;
  int num_here = 0, num_done = 0, num_gone = 0;
  bool broken = false;  // someone has left before all had come: it never takes place
};

struct Mail {
  Op op;
  bool taken = false, read = false;
};

// What the ranks with the same id share.
struct Clique {
  int num_ranks = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::set<int> joined;
  int num_finalized = 0;
  std::map<std::int64_t, Meeting> meetings;  // by number of the collective
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Mail>>> mail;  // from, to
};

struct Comm {
  std::shared_ptr<Clique> clique;
  int rank = 0;
  std::int64_t num_collectives = 0;
  // Under the mutex of the clique:
  NcclResult state = NcclResult::success;
  std::string error;
  bool aborted = false, finalized = false;
  std::unique_ptr<Queue> queue;  // for Pace::polled
};

c10::ScalarType dtype_of(NcclType type) {
  switch (type) {
    case NcclType::uint8: return at::kBool;
    case NcclType::int32: return at::kInt;
    case NcclType::int64: return at::kLong;
    case NcclType::float32: return at::kFloat;
    case NcclType::float64: return at::kDouble;
    case NcclType::bfloat16: return at::kBFloat16;
  }
  throw Error(ErrorKind::internal, "no such NCCL type");
}

struct Failure {
  NcclResult result = NcclResult::success;
  std::string text;
};

class Table : public std::enable_shared_from_this<Table> {
 public:
  Table(at::DeviceType device, Pace pace)
      : device_(device), pace_(pace), count_(std::make_shared<Count>()) {}

  Loopback loopback() {
    auto api = std::make_shared<NcclApi>();
    auto self = shared_from_this();
    api->device_type = device_;
    api->ranks_may_share_device = true;
    api->make_stream = [self](at::Device device) -> std::unique_ptr<CommStream> {
      if (device.is_cpu()) return std::make_unique<HostStream>();
      return std::make_unique<LoopbackStream>(device);
    };
    api->get_unique_id = [self](NcclUniqueId* id) { return self->get_unique_id(id); };
    api->comm_init_rank = [self](NcclComm* comm, int num_ranks, const NcclUniqueId& id, int rank) {
      return self->init(comm, num_ranks, id, rank);
    };
    api->comm_finalize = [self](NcclComm comm) { return self->finalize(comm); };
    api->comm_destroy = [self](NcclComm comm) { return self->destroy(comm); };
    api->comm_abort = [self](NcclComm comm) { return self->abort(comm); };
    api->get_async_error = [self](NcclComm comm, NcclResult* state) {
      return self->get_async_error(comm, state);
    };
    api->all_reduce = [self](const void* in, void* out, std::size_t n, NcclType t, NcclReduce op,
                             NcclComm c, void* s) {
      return self->call(c, s, {Kind::all_reduce, in, out, static_cast<std::int64_t>(n), t, op});
    };
    api->all_gather = [self](const void* in, void* out, std::size_t n, NcclType t, NcclComm c,
                             void* s) {
      return self->call(c, s, {Kind::all_gather, in, out, static_cast<std::int64_t>(n), t});
    };
    api->reduce_scatter = [self](const void* in, void* out, std::size_t n, NcclType t,
                                 NcclReduce op, NcclComm c, void* s) {
      return self->call(c, s, {Kind::reduce_scatter, in, out, static_cast<std::int64_t>(n), t, op});
    };
    api->broadcast = [self](const void* in, void* out, std::size_t n, NcclType t, int root,
                            NcclComm c, void* s) {
      return self->call(
          c, s, {Kind::broadcast, in, out, static_cast<std::int64_t>(n), t, NcclReduce::sum, root});
    };
    api->send = [self](const void* in, std::size_t n, NcclType t, int peer, NcclComm c, void* s) {
      return self->call(
          c, s, {Kind::send, in, nullptr, static_cast<std::int64_t>(n), t, NcclReduce::sum, peer});
    };
    api->recv = [self](void* out, std::size_t n, NcclType t, int peer, NcclComm c, void* s) {
      return self->call(
          c, s, {Kind::recv, nullptr, out, static_cast<std::int64_t>(n), t, NcclReduce::sum, peer});
    };
    api->group_start = [self] { return self->group_start(); };
    api->group_end = [self] { return self->group_end(); };
    api->error_string = [](NcclResult r) {
      return r == NcclResult::success ? "no error" : "an error of the loopback table";
    };
    api->last_error = [self](NcclComm comm) { return self->last_error(comm); };
    return {api, count_};
  }

 private:
  // What a thread has called since group_start.
  struct Pending {
    int depth = 0;
    NcclComm comm = nullptr;
    void* stream = nullptr;
    std::vector<Op> ops;
    bool wrong = false;
  };
  static Pending& pending() {
    thread_local Pending p;
    return p;
  }

  std::shared_ptr<Comm> find(NcclComm handle) {
    std::lock_guard lock(mutex_);
    const auto it = comms_.find(handle);
    return it == comms_.end() ? nullptr : it->second;
  }

  NcclResult get_unique_id(NcclUniqueId* id) {
    std::lock_guard lock(mutex_);
    std::memset(id, 0x5a, sizeof(*id));  // all 128 bytes must travel
    const std::int64_t number = ++num_ids_;
    std::memcpy(id->bytes, &number, sizeof(number));
    return NcclResult::success;
  }

  NcclResult init(NcclComm* handle, int num_ranks, const NcclUniqueId& id, int rank) {
    for (size_t i = sizeof(std::int64_t); i < sizeof(id.bytes); ++i)
      if (id.bytes[i] != 0x5a) return NcclResult::invalid_argument;
    std::int64_t number = 0;
    std::memcpy(&number, id.bytes, sizeof(number));
    std::lock_guard lock(mutex_);
    auto& clique = cliques_[number];
    if (!clique) clique = std::make_shared<Clique>();
    std::lock_guard inner(clique->mutex);
    if (clique->num_ranks == 0) clique->num_ranks = num_ranks;
    if (clique->num_ranks != num_ranks || rank < 0 || rank >= num_ranks ||
        !clique->joined.insert(rank).second)
      return NcclResult::invalid_argument;
    auto comm = std::make_shared<Comm>();
    comm->clique = clique;
    comm->rank = rank;
    if (pace_ == Pace::polled) comm->queue = std::make_unique<Queue>();
    *handle = reinterpret_cast<NcclComm>(comm.get());
    comms_[*handle] = comm;
    ++count_->created;
    return NcclResult::in_progress;
  }

  NcclResult get_async_error(NcclComm handle, NcclResult* state) {
    const auto comm = find(handle);
    if (!comm) return NcclResult::invalid_argument;
    Clique& q = *comm->clique;
    std::lock_guard lock(q.mutex);
    *state = comm->state;
    if (static_cast<int>(q.joined.size()) < q.num_ranks) *state = NcclResult::in_progress;
    if (comm->finalized && q.num_finalized < q.num_ranks) *state = NcclResult::in_progress;
    return NcclResult::success;
  }

  NcclResult finalize(NcclComm handle) {
    const auto comm = find(handle);
    if (!comm) return NcclResult::invalid_argument;
    std::lock_guard lock(comm->clique->mutex);
    if (comm->state == NcclResult::in_progress || comm->finalized) return NcclResult::invalid_usage;
    comm->finalized = true;
    ++comm->clique->num_finalized;
    return NcclResult::in_progress;
  }

  NcclResult destroy(NcclComm handle) {
    const auto comm = find(handle);
    if (!comm || !comm->finalized) return NcclResult::invalid_argument;
    comm->queue.reset();
    forget(handle);
    ++count_->destroyed;
    return NcclResult::success;
  }

  NcclResult abort(NcclComm handle) {
    const auto comm = find(handle);
    if (!comm) return NcclResult::invalid_argument;
    {
      std::lock_guard lock(comm->clique->mutex);
      comm->aborted = true;
      comm->clique->changed.notify_all();
    }
    comm->queue.reset();  // what it runs gives up now
    forget(handle);
    ++count_->aborted;
    return NcclResult::success;
  }

  void forget(NcclComm handle) {
    std::lock_guard lock(mutex_);
    comms_.erase(handle);
  }

  const char* last_error(NcclComm handle) {
    const auto comm = find(handle);
    if (!comm) return "";
    thread_local std::string text;
    std::lock_guard lock(comm->clique->mutex);
    text = comm->error;
    return text.c_str();
  }

  NcclResult group_start() {
    ++pending().depth;
    return NcclResult::success;
  }

  NcclResult group_end() {
    Pending& p = pending();
    if (p.depth == 0) return NcclResult::invalid_usage;
    if (--p.depth > 0) return NcclResult::success;
    const Pending batch = std::move(p);
    p = {};
    if (batch.wrong) return NcclResult::invalid_usage;
    return batch.ops.empty() ? NcclResult::success : dispatch(batch.comm, batch.stream, batch.ops);
  }

  NcclResult call(NcclComm comm, void* stream, const Op& op) {
    const bool is_message = op.kind == Kind::send || op.kind == Kind::recv;
    if ((op.kind != Kind::recv && op.count && !op.in) ||
        (op.kind != Kind::send && op.count && !op.out))
      return NcclResult::invalid_argument;
    Pending& p = pending();
    if (p.depth == 0) return dispatch(comm, stream, {op});
    // Groups here hold messages of one communicator on one stream: moesh makes no others.
    if (!is_message || (p.comm && (p.comm != comm || p.stream != stream))) p.wrong = true;
    p.comm = comm;
    p.stream = stream;
    p.ops.push_back(op);
    return NcclResult::success;
  }

  NcclResult dispatch(NcclComm handle, void* stream, const std::vector<Op>& ops) {
    const auto comm = find(handle);
    if (!comm) return NcclResult::invalid_argument;
    Clique& q = *comm->clique;
    {
      std::lock_guard lock(q.mutex);
      // Not before the start has ended, not while a call is in progress, not after the end.
      if (static_cast<int>(q.joined.size()) < q.num_ranks || comm->state != NcclResult::success ||
          comm->finalized)
        return NcclResult::invalid_usage;
      if (pace_ == Pace::polled) comm->state = NcclResult::in_progress;
    }
    const bool is_message = ops[0].kind == Kind::send || ops[0].kind == Kind::recv;
    const std::int64_t number = is_message ? -1 : comm->num_collectives++;
    auto run = [self = shared_from_this(), comm, stream, ops, number] {
      Failure failure;
      try {
        failure = self->on_stream(stream, [&] {
          return number < 0 ? self->exchange(*comm, ops) : self->collective(*comm, number, ops[0]);
        });
      } catch (const std::exception& e) {
        failure = {NcclResult::internal_error, e.what()};
      }
      std::lock_guard lock(comm->clique->mutex);
      if (comm->state != NcclResult::success && comm->state != NcclResult::in_progress)
        return;  // the first error stays
      comm->state = failure.result;
      comm->error = failure.text;
    };
    if (pace_ == Pace::queued) {
      static_cast<HostStream*>(stream)->run(run);
      return NcclResult::success;
    }
    comm->queue->push(run);
    return NcclResult::in_progress;
  }

  // Makes the stream of the call the current one; what the peers read is ready, and what is read is
  // there at the end.
  Failure on_stream(void* handle, const std::function<Failure()>& f) {
    if (device_ == at::kCPU) return f();
    const c10::Stream stream = static_cast<DeviceStream*>(handle)->stream();
    const c10::StreamGuard guard(stream);
    stream_ = &stream;
    stream.synchronize();
    return f();
  }

  void finish_copies() {
    if (device_ != at::kCPU) stream_->synchronize();
  }

  at::TensorOptions options(NcclType type) const {
    at::Device device(device_);
    if (device_ != at::kCPU) device = stream_->device();
    return at::TensorOptions(dtype_of(type)).device(device);
  }

  static Span span(const void* data, std::int64_t start, std::int64_t count, NcclType type) {
    const auto bytes = start * static_cast<std::int64_t>(c10::elementSize(dtype_of(type)));
    return {const_cast<std::byte*>(static_cast<const std::byte*>(data)) + bytes, count};
  }

  Failure collective(Comm& comm, std::int64_t number, const Op& op) {
    Clique& q = *comm.clique;
    const int n = q.num_ranks;
    std::unique_lock lock(q.mutex);
    Meeting& m = q.meetings[number];
    m.ops.resize(static_cast<size_t>(n));
    m.ops[static_cast<size_t>(comm.rank)] = op;
    ++m.num_here;
    q.changed.notify_all();
    const auto complete = [&] { return m.num_here == n && !m.broken; };
    q.changed.wait(lock, [&] { return complete() || comm.aborted; });
    if (!complete()) {
      m.broken = true;
      return {NcclResult::internal_error, "aborted"};
    }
    Failure failure;
    for (const auto& other : m.ops)
      if (!other->fits(op))
        failure = {NcclResult::invalid_usage,
                   detail::concat("the ranks disagree on collective ", number)};
    lock.unlock();
    at::Tensor reduced;  // in place is allowed: nobody writes before everyone has read
    if (failure.result == NcclResult::success) {
      try {
        reduced = perform(comm.rank, m.ops, op);
        finish_copies();
      } catch (const std::exception& e) {
        failure = {NcclResult::internal_error, e.what()};
      }
    }
    lock.lock();
    // Even after an abort: the peers may still be reading.
    ++m.num_done;
    q.changed.notify_all();
    q.changed.wait(lock, [&] { return m.num_done == n; });
    if (++m.num_gone == n) q.meetings.erase(number);
    lock.unlock();
    if (reduced.defined()) {
      copy(span(op.out, 0, op.count, op.type), {reduced.data_ptr(), op.count}, reduced.options());
      finish_copies();
    }
    return failure;
  }

  // Reads what all have brought. A gather or broadcast goes straight to its place; the result of a
  // reduction is returned.
  at::Tensor perform(int rank, const std::vector<std::optional<Op>>& ops, const Op& op) {
    const auto opts = options(op.type);
    const ReduceOp reduce = op.reduce == NcclReduce::sum   ? ReduceOp::sum
                            : op.reduce == NcclReduce::max ? ReduceOp::max
                                                           : ReduceOp::min;
    const bool scatters = op.kind == Kind::reduce_scatter;
    std::vector<Span> spans;
    for (const auto& other : ops)
      spans.push_back(span(other->in, scatters ? rank * op.count : 0, op.count, op.type));
    if (op.kind == Kind::all_reduce || scatters) {
      at::Tensor reduced = at::empty({op.count}, opts);
      fold(reduce, spans, {reduced.data_ptr(), op.count}, opts);
      return reduced;
    }
    if (op.kind == Kind::broadcast) {
      copy(span(op.out, 0, op.count, op.type), spans[static_cast<size_t>(op.peer)], opts);
    } else {
      for (size_t j = 0; j < spans.size(); ++j)
        copy(span(op.out, static_cast<std::int64_t>(j) * op.count, op.count, op.type), spans[j],
             opts);
    }
    return {};
  }

  Failure exchange(Comm& comm, const std::vector<Op>& ops) {
    Clique& q = *comm.clique;
    std::unique_lock lock(q.mutex);
    std::vector<std::shared_ptr<Mail>> sent;
    for (const Op& op : ops) {
      if (op.kind != Kind::send) continue;
      sent.push_back(std::make_shared<Mail>(Mail{op}));
      q.mail[{comm.rank, op.peer}].push_back(sent.back());
    }
    q.changed.notify_all();
    Failure failure;
    for (const Op& op : ops) {
      if (op.kind != Kind::recv) continue;
      auto& box = q.mail[{op.peer, comm.rank}];
      q.changed.wait(lock, [&] { return !box.empty() || comm.aborted; });
      if (box.empty()) {
        failure = {NcclResult::internal_error, "aborted"};
        break;
      }
      const auto mail = box.front();
      box.pop_front();
      mail->taken = true;
      lock.unlock();
      if (mail->op.count != op.count || mail->op.type != op.type) {
        failure = {NcclResult::invalid_usage,
                   detail::concat("rank ", op.peer, " sends ", mail->op.count,
                                  " elements and rank ", comm.rank, " expects ", op.count)};
      } else {
        copy(span(op.out, 0, op.count, op.type), span(mail->op.in, 0, op.count, op.type),
             options(op.type));
        finish_copies();
      }
      lock.lock();
      mail->read = true;
      q.changed.notify_all();
    }
    for (const auto& mail : sent) {
      q.changed.wait(lock, [&] { return mail->read || (!mail->taken && comm.aborted); });
      if (mail->read) continue;
      auto& box = q.mail[{comm.rank, mail->op.peer}];
      box.erase(std::find(box.begin(), box.end(), mail));
      failure = {NcclResult::internal_error, "aborted"};
    }
    return failure;
  }

  const at::DeviceType device_;
  const Pace pace_;
  const std::shared_ptr<Count> count_;
  std::mutex mutex_;  // taken before that of a clique
  std::int64_t num_ids_ = 0;
  std::map<std::int64_t, std::shared_ptr<Clique>> cliques_;
  std::map<NcclComm, std::shared_ptr<Comm>> comms_;
  static thread_local const c10::Stream* stream_;
};

thread_local const c10::Stream* Table::stream_ = nullptr;

}  // namespace

std::unique_ptr<CommStream> host_stream() { return std::make_unique<HostStream>(); }

Loopback make(at::DeviceType device, Pace pace) {
  MOESH_CHECK(device == at::kCPU || pace == Pace::polled,
              "work on a device is queued by the device itself");
  return std::make_shared<Table>(device, pace)->loopback();
}

}  // namespace moesh::comm::loopback
