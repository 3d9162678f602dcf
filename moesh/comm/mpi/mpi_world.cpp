#include "moesh/comm/mpi/mpi_world.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "moesh/base/error.h"
#include "moesh/base/exit_code.h"
#include "moesh/base/log.h"
#include "moesh/base/sections.h"
#include "moesh/comm/roll.h"

namespace moesh::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::int64_t kPieceBytes = 16
                                     << 20;  // MPI counts in int: a large span is several messages
constexpr milliseconds kGrace{50};  // what was sent before bad news may still be on its way
constexpr milliseconds kLinger{
    2000};                   // after a fault, for the other processes to say what they have to say
constexpr int kNewsTag = 0;  // tags of spans are positive
constexpr int kWorldContext = 1;

void check_mpi(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(ErrorKind::comm,
              detail::concat(what, " failed: ", std::string(text, static_cast<size_t>(length))));
}

// Between two looks: the core goes to whoever wants it, and after some of them the thread sleeps,
// longer and longer.
class Backoff {
 public:
  void pause() {
    if (++num_ < kYields) return std::this_thread::yield();
    std::this_thread::sleep_for(
        std::chrono::microseconds(std::min(1000, 20 << std::min(6, (num_ - kYields) / 8))));
  }

 private:
  static constexpr int kYields = 200;
  int num_ = 0;
};

// Requests in progress, and the peer of each.
class Requests {
 public:
  MPI_Request* add(int peer) {
    peers_.push_back(peer);
    return &handles_.emplace_back(MPI_REQUEST_NULL);
  }
  // Lets MPI work; true when nothing is in progress any more.
  bool test() {
    if (handles_.empty()) return true;
    int num_done = 0;
    done_.resize(handles_.size());
    statuses_.resize(handles_.size());
    const int code = MPI_Testsome(static_cast<int>(handles_.size()), handles_.data(), &num_done,
                                  done_.data(), statuses_.data());
    if (code == MPI_ERR_IN_STATUS) {
      for (int i = 0; i < num_done; ++i)
        check_mpi(statuses_[static_cast<size_t>(i)].MPI_ERROR, "an MPI message");
    } else {
      check_mpi(code, "MPI_Testsome");
    }
    return !active();
  }
  bool active() const {
    return std::any_of(handles_.begin(), handles_.end(),
                       [](MPI_Request r) { return r != MPI_REQUEST_NULL; });
  }
  std::vector<int> missing() const {
    std::vector<int> peers;
    for (size_t i = 0; i < handles_.size(); ++i)
      if (handles_[i] != MPI_REQUEST_NULL) peers.push_back(peers_[i]);
    std::sort(peers.begin(), peers.end());
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    return peers;
  }

 private:
  std::vector<MPI_Request> handles_;
  std::vector<int> peers_;
  std::vector<int> done_;
  std::vector<MPI_Status> statuses_;
};

// MPI may still write to the buffers of a request that was given up: they are never freed, and stay
// reachable.
struct BuryIfActive {
  template <class T>
  void operator()(T* buffers) const {
    if (!buffers->active()) return delete buffers;
    static std::mutex& mutex = *new std::mutex;
    static auto& graveyard = *new std::vector<T*>;
    std::lock_guard lock(mutex);
    graveyard.push_back(buffers);
  }
};
template <class T>
using Buffers = std::unique_ptr<T, BuryIfActive>;

// MPI_Init and the first collectives of MPI block until every process has come, and nothing
// interrupts them. When the deadline passes before this object is gone, the process says so and
// ends, and the launcher ends the others.
class StartDeadline {
 public:
  explicit StartDeadline(milliseconds timeout) : watchdog_([this, timeout] { watch(timeout); }) {}
  ~StartDeadline() {
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    changed_.notify_all();
    watchdog_.join();
  }

 private:
  void watch(milliseconds timeout) {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, timeout, [&] { return is_over_; })) return;
    log(LogLevel::error, "MPI has not started within ",
        std::chrono::duration<double>(timeout).count(),
        " s: one of the processes that were launched has not come, or hangs; see the machines "
        "it should run on, or allow more time with debug.timeout_seconds");
    std::_Exit(static_cast<int>(ExitCode::lost_rank));
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_over_ = false;
  std::thread watchdog_;
};

// MPI in this process: started by the first launch. It is ended at exit if the last world ended
// well: MPI_Finalize waits for all processes, and one that exits without it makes the launcher end
// the job.
class Process {
 public:
  static Process& instance(milliseconds timeout) {
    static Process& process = *new Process(timeout);
    return process;
  }

  MPI_Comm comm() const { return comm_; }
  int index() const { return index_; }
  int size() const { return size_; }
  int num_on_machine() const { return num_on_machine_; }
  int tag_limit() const { return tag_limit_; }

  std::mutex running;  // held by the launch in progress
  std::int64_t num_launches = 0;
  bool unusable = false;                       // a world's start was given up half-way
  static inline std::atomic<bool> ended_well;  // the last world
 private:
  explicit Process(milliseconds timeout) {
    const StartDeadline deadline(timeout);
    int started = 0, level = MPI_THREAD_SINGLE;
    check_mpi(MPI_Initialized(&started), "MPI_Initialized");
    if (started) {
      check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
    } else {
      check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
      std::atexit([] {
        int finalized = 0;
        MPI_Finalized(&finalized);
        if (ended_well && !finalized) MPI_Finalize();
      });
    }
    MOESH_CHECK(level >= MPI_THREAD_MULTIPLE, ErrorKind::config, "this MPI gives thread level ",
                level, " and moesh needs MPI_THREAD_MULTIPLE (", MPI_THREAD_MULTIPLE,
                "): use an MPI that was built with it, and start it with it");
    check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &comm_), "MPI_Comm_dup");
    check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check_mpi(MPI_Comm_rank(comm_, &index_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
    MPI_Comm machine = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine),
              "MPI_Comm_split_type");
    check_mpi(MPI_Comm_size(machine, &num_on_machine_), "MPI_Comm_size");
    check_mpi(MPI_Comm_free(&machine), "MPI_Comm_free");
    int* limit = nullptr;
    int found = 0;
    check_mpi(MPI_Comm_get_attr(comm_, MPI_TAG_UB, static_cast<void*>(&limit), &found),
              "MPI_Comm_get_attr");
    tag_limit_ = found ? *limit : 32767;
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int index_ = 0, size_ = 1, num_on_machine_ = 1, tag_limit_ = 0;
};

// What a process tells the others about one of its ranks. Small, so that MPI takes it at once.
struct News {
  std::int32_t rank = 0;
  std::int32_t failed = 0;
  char text[2000] = {};
};

// What the groups of one rank share.
struct RankInfo {
  int next_context = kWorldContext + 1;
  // Spans sent so far. The groups of a rank may be used by two threads, and no two spans in
  // progress may have one tag.
  std::atomic<std::int64_t> num_blocks = 0;
};

// A group as its exchanges know it.
struct GroupInfo {
  std::string name;
  std::vector<int> members;  // world ranks
  int rank = 0;              // in the group
  int context = 0;           // tells its headers from those of other groups with common members
  std::shared_ptr<RankInfo> of_rank = std::make_shared<RankInfo>();

  int world_rank() const { return members[static_cast<size_t>(rank)]; }
};

// This process's side of one world. Each has a communicator of its own, so that no message of an
// earlier one is ever matched.
class MpiWorld {
 public:
  MpiWorld(Process& process, int num_ranks, milliseconds timeout)
      : process_(process),
        num_ranks_(num_ranks),
        per_process_(num_ranks / process.size()),
        timeout_(timeout),
        roll_(num_ranks) {
    while ((1 << thread_bits_) < per_process_) ++thread_bits_;
    meet();
    listen_again();
  }

  MPI_Comm comm() const { return comm_; }
  int num_ranks() const { return num_ranks_; }
  int first_rank() const { return process_.index() * per_process_; }
  int per_process() const { return per_process_; }
  int process_of(int rank) const { return rank / per_process_; }
  const Roll& roll() const { return roll_; }
  int max_context() const { return process_.tag_limit() >> (2 * thread_bits_ + 5); }

  // Tags: headers are even, and matched by group, threads and exchange (of those in progress);
  // spans are odd, and the header that goes before one tells its tag: `count` spans were sent by
  // that thread before.
  int header_tag(int context, int from, int to, const Call& call) const {
    return ((context << 2 * thread_bits_ | threads(from, to)) << 3 |
            static_cast<int>(call.sequence & 7))
               << 2 |
           call.phase << 1;
  }
  int block_tag(int from, int to, std::int64_t count) const {
    const std::int64_t limit = (std::int64_t{process_.tag_limit()} + 1) >> (2 * thread_bits_ + 1);
    return (static_cast<int>(count % limit) << 2 * thread_bits_ | threads(from, to)) << 1 | 1;
  }

  // Works on the requests until all are done. Peers are ranks of the group.
  void wait(Requests& requests, const Call& call, const GroupInfo& group, const char* where) {
    const InSection waiting(Section::waiting);
    const auto deadline = Clock::now() + timeout_;
    auto bad_news = Clock::time_point::max();
    for (Backoff backoff;; backoff.pause()) {
      listen();
      if (requests.test()) return;
      std::vector<int> missing;
      for (int peer : requests.missing())
        missing.push_back(group.members[static_cast<size_t>(peer)]);
      const auto now = Clock::now();
      std::string why = roll_.reason(missing);
      if (why.empty()) {
        if (now < deadline) continue;
        why = too_late(missing, timeout_);
      } else {
        bad_news = std::min(bad_news, now);
        if (now < bad_news + kGrace) continue;
      }
      give_up(group.world_rank(), where, call, group.name, why);
    }
  }

  // A rank of this process returned or threw: everyone is told.
  void leave(int rank, std::exception_ptr fault) {
    auto news = std::make_unique<News>();
    news->rank = rank;
    if (fault) {
      const std::string text = text_of(fault);
      news->failed = 1;
      std::memcpy(news->text, text.data(), std::min(text.size(), sizeof(news->text) - 1));
      roll_.threw(rank, fault);
    } else {
      roll_.returned(rank);
    }
    std::lock_guard lock(sending_);
    for (int p = 0; p < process_.size(); ++p) {
      if (p == process_.index()) continue;
      const int code = MPI_Isend(news.get(), sizeof(News), MPI_BYTE, p, kNewsTag, comm_,
                                 outbox_->requests.add(p));
      if (code != MPI_SUCCESS)
        log_warn("MPI process ", p, " could not be told that rank ", rank, " has ended");
    }
    outbox_->news.push_back(std::move(news));
  }

  // Returns when every rank of the world has returned; else throws.
  void finish() {
    const auto begin = Clock::now();
    for (Backoff backoff;; backoff.pause()) {
      listen();
      const bool sent = outbox_->requests.test();
      const auto present = roll_.present();
      if (sent && present.empty()) break;
      const bool failed = !roll_.first_failure().empty();
      const auto waited = Clock::now() - begin;
      if (failed && waited >= std::min(kLinger, timeout_)) break;
      if (waited < timeout_) continue;
      hang_up();
      throw Error(ErrorKind::comm,
                  detail::concat("ranks ", first_rank(), " to ", first_rank() + per_process_ - 1,
                                 " have returned, and ", name_ranks(present), " did not within ",
                                 std::chrono::duration<double>(timeout_).count(), " s"));
    }
    hang_up();
    if (const auto fault = roll_.first_exception()) std::rethrow_exception(fault);
    const std::string failure = roll_.first_failure();
    MOESH_CHECK(failure.empty(), ErrorKind::comm, failure);
    check_mpi(MPI_Comm_free(&comm_), "MPI_Comm_free");
  }

 private:
  struct Outbox {
    std::vector<std::unique_ptr<News>> news;
    Requests requests;
    bool active() const { return requests.active(); }
  };
  struct Greeting {
    std::int64_t launch = 0, num_ranks = 0;
  };
  struct Meeting {
    Greeting mine;
    std::vector<Greeting> theirs;
    Requests requests;
    MPI_Comm comm = MPI_COMM_NULL;
    bool active() const { return requests.active(); }
  };

  // All processes come, with the same number of ranks, and make the communicator.
  void meet() {
    const Buffers<Meeting> meeting(new Meeting);
    greet(*meeting);
    process_.unusable = true;  // if this is given up, communicators would not match any more
    check_mpi(
        MPI_Comm_idup(process_.comm(), &meeting->comm, meeting->requests.add(process_.index())),
        "MPI_Comm_idup");
    complete(meeting->requests, "the start of a world");
    process_.unusable = false;
    comm_ = meeting->comm;
  }

  void greet(Meeting& m) {
    m.mine = {process_.num_launches, num_ranks_};
    m.theirs.resize(static_cast<size_t>(process_.size()));
    const int tag = static_cast<int>(process_.num_launches & 0x3fff);
    for (int p = 0; p < process_.size(); ++p) {
      if (p == process_.index()) continue;
      check_mpi(MPI_Irecv(&m.theirs[static_cast<size_t>(p)], sizeof(Greeting), MPI_BYTE, p, tag,
                          process_.comm(), m.requests.add(p)),
                "MPI_Irecv");
      check_mpi(MPI_Isend(&m.mine, sizeof(Greeting), MPI_BYTE, p, tag, process_.comm(),
                          m.requests.add(p)),
                "MPI_Isend");
    }
    complete(m.requests, "launch");
    for (int p = 0; p < process_.size(); ++p) {
      const auto& theirs = m.theirs[static_cast<size_t>(p)];
      MOESH_CHECK(p == process_.index() ||
                      (theirs.launch == m.mine.launch && theirs.num_ranks == m.mine.num_ranks),
                  ErrorKind::config, "MPI process ", process_.index(), " launches ",
                  m.mine.num_ranks, " ranks as world ", m.mine.launch, ", and process ", p, " ",
                  theirs.num_ranks, " as world ", theirs.launch,
                  ". All processes must make the same calls of launch.");
    }
  }

  // Waits for messages of other processes than those of a group's ranks.
  void complete(Requests& requests, const char* what) {
    const auto deadline = Clock::now() + timeout_;
    for (Backoff backoff; !requests.test(); backoff.pause())
      MOESH_CHECK(Clock::now() < deadline, ErrorKind::comm, "MPI process ", process_.index(),
                  " waited in ", what, ": of ", process_.size(), " processes ", requests.missing(),
                  " did not come within ", std::chrono::duration<double>(timeout_).count(), " s");
  }

  int threads(int from, int to) const {
    return from % per_process_ << thread_bits_ | to % per_process_;
  }

  // Takes in what other processes have said. Ranks that wait take turns.
  void listen() {
    std::unique_lock lock(listening_, std::try_to_lock);
    if (!lock) return;
    for (;;) {
      int heard = 0;
      check_mpi(MPI_Test(&incoming_, &heard, MPI_STATUS_IGNORE), "MPI_Test");
      if (!heard) return;
      if (inbox_->failed) {
        roll_.failed(inbox_->rank, inbox_->text);
      } else {
        roll_.returned(inbox_->rank);
      }
      listen_again();
    }
  }

  void listen_again() {
    check_mpi(MPI_Irecv(inbox_.get(), sizeof(News), MPI_BYTE, MPI_ANY_SOURCE, kNewsTag, comm_,
                        &incoming_),
              "MPI_Irecv");
  }

  void hang_up() {
    check_mpi(MPI_Cancel(&incoming_), "MPI_Cancel");
    check_mpi(MPI_Wait(&incoming_, MPI_STATUS_IGNORE), "MPI_Wait");
  }

  Process& process_;
  const int num_ranks_, per_process_;
  int thread_bits_ = 0;
  const milliseconds timeout_;
  Roll roll_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  std::mutex listening_, sending_;
  std::unique_ptr<News> inbox_ = std::make_unique<News>();
  const Buffers<Outbox> outbox_{new Outbox};
  MPI_Request incoming_ = MPI_REQUEST_NULL;
};

// What goes before each span.
struct Header {
  Call call;
  std::int64_t numel = 0;
  std::int64_t tag = 0;
};

// All memory that MPI reads and writes in one exchange.
struct Transfer {
  explicit Transfer(Post p)
      : post(std::move(p)),
        sent(post.send.size()),
        received(post.send.size()),
        landing(post.send.size()) {}
  bool active() const { return headers.active() || spans.active() || sends.active(); }

  Post post;
  std::vector<Header> sent, received;
  std::vector<Span> landing;  // where spans arrive, in host memory
  std::vector<at::Tensor>
      buffers;  // its memory, where it is not the caller's, and staged copies of what is sent
  Requests headers, spans, sends;
};

at::Tensor view(Span span, const at::TensorOptions& options) {
  return at::from_blob(span.data, {span.numel}, options);
}

class MpiExchange final : public Exchange {
 public:
  MpiExchange(std::shared_ptr<MpiWorld> world, std::shared_ptr<const GroupInfo> group, Post post)
      : world_(std::move(world)),
        group_(std::move(group)),
        transfer_(new Transfer(std::move(post))) {
    MOESH_CHECK(!world_->roll().has_left(group_->world_rank()), ErrorKind::comm, call().describe(),
                " on group '", group_->name, "', whose world has ended");
    const auto outgoing = staged(transfer_->post.send);
    // Round the group, so that ranks do not all send to the same peer at once.
    for (int k = 1; k < size(); ++k) receive_header((group_->rank + size() - k) % size());
    for (int k = 1; k < size(); ++k) send((group_->rank + k) % size(), outgoing);
  }

  std::vector<Span> receive() override {
    Transfer& t = *transfer_;
    t.received[static_cast<size_t>(group_->rank)] = {
        call(), t.post.send[static_cast<size_t>(group_->rank)].numel, 0};
    world_->wait(t.headers, call(), *group_, "");
    std::vector<Call> calls;
    for (const auto& h : t.received) calls.push_back(h.call);
    const std::string verdict = disagreement(calls, group_->members, group_->name);
    MOESH_CHECK(verdict.empty(), ErrorKind::comm, verdict);
    for (size_t j = 0; j < t.received.size(); ++j)
      check_count(t.received[j].numel, t.post.recv[j], call(), group_->name, group_->members[j],
                  group_->world_rank());
    // Only now is it certain that the spans fit: Open MPI 4 writes beyond the end of a receive
    // that is too short.
    for (int k = 1; k < size(); ++k) receive_block((group_->rank + size() - k) % size());
    world_->wait(t.spans, call(), *group_, "");
    return on_device();
  }

  void close() override { world_->wait(transfer_->sends, call(), *group_, "the end of "); }

 private:
  const Call& call() const { return transfer_->post.call; }
  int size() const { return static_cast<int>(group_->members.size()); }
  bool is_staged() const { return !transfer_->post.options.device().is_cpu(); }
  std::int64_t item_bytes() const {
    return static_cast<std::int64_t>(transfer_->post.options.dtype().itemsize());
  }

  // Spans on an accelerator are sent from copies in host memory; a span that goes to several
  // ranks is copied once.
  std::vector<Span> staged(const std::vector<Span>& spans) {
    if (!is_staged()) return spans;
    std::map<std::pair<void*, std::int64_t>, void*> copies;
    std::vector<Span> host = spans;
    for (int j = 0; j < size(); ++j) {
      Span& b = host[static_cast<size_t>(j)];
      if (j == group_->rank || b.numel == 0) continue;
      void*& copy = copies[{b.data, b.numel}];
      if (!copy)
        copy = transfer_->buffers.emplace_back(view(b, transfer_->post.options).cpu()).data_ptr();
      b.data = copy;
    }
    return host;
  }

  void receive_header(int peer) {
    const auto j = static_cast<size_t>(peer);
    const int from = group_->members[j];
    check_mpi(MPI_Irecv(&transfer_->received[j], sizeof(Header), MPI_BYTE, world_->process_of(from),
                        world_->header_tag(group_->context, from, group_->world_rank(), call()),
                        world_->comm(), transfer_->headers.add(peer)),
              "MPI_Irecv");
  }

  void receive_block(int peer) {
    Transfer& t = *transfer_;
    const auto j = static_cast<size_t>(peer);
    const int process = world_->process_of(group_->members[j]);
    if (!is_staged() && !t.post.into.empty()) {
      t.landing[j] = t.post.into[j];
    } else if (t.post.recv[j] > 0) {
      const auto& buffer =
          t.buffers.emplace_back(at::empty({t.post.recv[j]}, t.post.options.device(at::kCPU)));
      t.landing[j] = {buffer.data_ptr(), t.post.recv[j]};
    }
    for_pieces(t.landing[j], [&](void* data, int bytes) {
      check_mpi(MPI_Irecv(data, bytes, MPI_BYTE, process, static_cast<int>(t.received[j].tag),
                          world_->comm(), t.spans.add(peer)),
                "MPI_Irecv");
    });
  }

  void send(int peer, const std::vector<Span>& outgoing) {
    Transfer& t = *transfer_;
    const auto j = static_cast<size_t>(peer);
    const int me = group_->world_rank(), to = group_->members[j];
    const int process = world_->process_of(to);
    const int tag = world_->block_tag(me, to, group_->of_rank->num_blocks++);
    t.sent[j] = {call(), outgoing[j].numel, tag};
    check_mpi(MPI_Isend(&t.sent[j], sizeof(Header), MPI_BYTE, process,
                        world_->header_tag(group_->context, me, to, call()), world_->comm(),
                        t.sends.add(peer)),
              "MPI_Isend");
    for_pieces(outgoing[j], [&](void* data, int bytes) {
      check_mpi(MPI_Isend(data, bytes, MPI_BYTE, process, tag, world_->comm(), t.sends.add(peer)),
                "MPI_Isend");
    });
  }

  template <class F>
  void for_pieces(Span span, const F& f) const {
    const std::int64_t bytes = span.numel * item_bytes();
    for (std::int64_t start = 0; start < bytes; start += kPieceBytes)
      f(static_cast<char*>(span.data) + start,
        static_cast<int>(std::min(kPieceBytes, bytes - start)));
  }

  // What came, where the caller's tensors live. The own span was never sent.
  std::vector<Span> on_device() {
    Transfer& t = *transfer_;
    std::vector<Span> spans = t.landing;
    spans[static_cast<size_t>(group_->rank)] = t.post.send[static_cast<size_t>(group_->rank)];
    if (!is_staged()) return spans;
    for (int j = 0; j < size(); ++j) {
      const auto i = static_cast<size_t>(j);
      if (j == group_->rank || spans[i].numel == 0) continue;
      const at::Tensor host = view(t.landing[i], t.post.options.device(at::kCPU));
      if (t.post.into.empty()) {
        spans[i].data = t.buffers.emplace_back(host.to(t.post.options.device())).data_ptr();
      } else {
        view(t.post.into[i], t.post.options).copy_(host);
        spans[i].data = t.post.into[i].data;
      }
    }
    return spans;
  }

  std::shared_ptr<MpiWorld> world_;
  std::shared_ptr<const GroupInfo> group_;
  const Buffers<Transfer> transfer_;
};

class MpiGroup final : public HostGroup {
 public:
  MpiGroup(std::shared_ptr<MpiWorld> world, GroupInfo info)
      : HostGroup(info.name, info.rank, info.members),
        world_(std::move(world)),
        info_(std::make_shared<GroupInfo>(std::move(info))) {}

 private:
  std::unique_ptr<Exchange> post(Post post) override {
    return std::make_unique<MpiExchange>(world_, info_, std::move(post));
  }

  std::shared_ptr<Group> do_split(const std::vector<int>& members, int rank, int,
                                  const std::string& name) override {
    // The groups of one split have no common member, so one context serves them all: one that no
    // rank of this group has used in any group.
    const int context = highest(info_->of_rank->next_context);
    MOESH_CHECK(context <= world_->max_context(), ErrorKind::comm, "split of group '", this->name(),
                "' would make group number ", context,
                " of this world, and MPI's tags leave room for ", world_->max_context(),
                ": keep groups and use them again");
    info_->of_rank->next_context = context + 1;
    if (members.size() <= 1) return nullptr;
    return std::make_shared<MpiGroup>(world_, GroupInfo{.name = name,
                                                        .members = world_ranks(members),
                                                        .rank = rank,
                                                        .context = context,
                                                        .of_rank = info_->of_rank});
  }

  // The largest value over the ranks. It is a part of the operation before it, the gather of colors
  // and keys.
  int highest(std::int64_t value) {
    const auto n = static_cast<size_t>(size());
    const at::Tensor mine = at::full({1}, value, at::kLong);
    Call call;
    call.op = Collective::split;
    call.sequence = last_sequence();
    call.phase = 1;
    call.dtype = static_cast<std::int8_t>(at::kLong);
    auto exchange = post({.call = call,
                          .send = std::vector<Span>(n, Span{mine.data_ptr(), 1}),
                          .recv = std::vector<std::int64_t>(n, 1),
                          .into = {},
                          .keep = {mine},
                          .options = mine.options()});
    std::int64_t most = value;
    for (const auto& b : exchange->receive())
      most = std::max(most, *static_cast<const std::int64_t*>(b.data));
    exchange->close();
    return static_cast<int>(most);
  }

  std::shared_ptr<MpiWorld> world_;
  std::shared_ptr<const GroupInfo> info_;
};

std::shared_ptr<Group> world_group(const std::shared_ptr<MpiWorld>& world, int rank) {
  GroupInfo info{.name = "world",
                 .members = std::vector<int>(static_cast<size_t>(world->num_ranks())),
                 .rank = rank,
                 .context = kWorldContext};
  std::iota(info.members.begin(), info.members.end(), 0);
  return std::make_shared<MpiGroup>(world, std::move(info));
}

}  // namespace

bool has_mpi() { return true; }

void launch_mpi(int num_ranks, const std::function<void(Group& world)>& f,
                const LaunchOptions& options) {
  Process& process = Process::instance(options.timeout);
  std::unique_lock running(process.running, std::try_to_lock);
  MOESH_CHECK(running.owns_lock(), ErrorKind::config,
              "launch inside launch: under MPI a process runs one world at a time");
  MOESH_CHECK(!process.unusable, ErrorKind::comm,
              "the start of an earlier world was given up half-way: start the processes again");
  const int size = process.size();
  if (num_ranks == 0) num_ranks = size;
  MOESH_CHECK(
      num_ranks > 0 && num_ranks % size == 0, ErrorKind::config, "launch of ", num_ranks,
      " ranks on ", size,
      " MPI processes: each process runs the same number of ranks, so use 0 (one rank a process), ",
      size, ", ", 2 * size, ", ..., or start another number of processes");
  ++process.num_launches;
  process.ended_well = false;
  const auto world = std::make_shared<MpiWorld>(process, num_ranks, options.timeout);
  run_rank_threads(
      {.first = world->first_rank(),
       .count = world->per_process(),
       .num_on_machine = process.num_on_machine() * world->per_process(),
       .group = [&](int rank) { return world_group(world, rank); },
       .leave = [&](int rank, std::exception_ptr fault) { world->leave(rank, fault); }},
      f, options);
  world->finish();
  process.ended_well = true;
}

}  // namespace moesh::comm
