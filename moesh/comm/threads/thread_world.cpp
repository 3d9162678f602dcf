#include "moesh/comm/threads/thread_world.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/base/timeline.h"
#include "moesh/comm/host_group.h"
#include "moesh/comm/rank_status.h"

namespace moesh::comm {

// Messages between ranks that are threads. Nothing is kept in between: when both ends have come,
// the one that came last copies from the tensor of the sender into that of the receiver. So a
// message arrives while the rank that waits for it, or for another one, does nothing.

class ThreadWorld;

/// A peer is often only a few microseconds behind, and to block and be woken costs more than that.
constexpr int kYieldsBeforeBlocking = 50;

/// The messages of one group that are on their way. Channels are of ranks of the group.
class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  Mailbox(std::weak_ptr<ThreadWorld> world, std::string group, std::vector<int> members)
      : world_(std::move(world)), group_(std::move(group)), members_(std::move(members)) {}

  /// One end of a message comes, as `call` says. x is what is sent, or where it goes. Null: there
  /// is no queue.
  std::unique_ptr<Work> bring(const Channel& channel, const Call& call, const at::Tensor& x,
                              CommStream* queue);

  /// A rank has left the world: ranks that wait for it look again.
  void wake();

 private:
  friend class LetterWork;
  struct Letter;

  void deliver(Letter& letter, CommStream* queue);
  void wait(const Letter& letter, int rank, const Call& call);

  const std::weak_ptr<ThreadWorld> world_;
  const std::string group_;
  const std::vector<int> members_;  // world ranks
  std::mutex mutex_;
  std::condition_variable changed_;
  // Messages of which one end has come, and so all ends of a channel are of one kind.
  std::map<Channel, std::deque<std::shared_ptr<Letter>>> waiting_;
};

namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

// One message. Both ends write before they have met, and not after.
struct Mailbox::Letter {
  Call send, recv;
  at::Tensor x, out;
  std::shared_ptr<StreamOrigin> x_is_there, out_is_there;  // on a device
  std::shared_ptr<Mark> is_copied;
  bool is_matched = false;  // both ends are there: it is being delivered
  std::atomic<bool> is_delivered = false;
  std::string verdict;  // why it was not
};

// One end of a message.
class LetterWork final : public Work {
 public:
  LetterWork(std::shared_ptr<Mailbox> mailbox, std::shared_ptr<Mailbox::Letter> letter,
             const Call& call, int rank, at::Tensor mine)
      : mailbox_(std::move(mailbox)),
        letter_(std::move(letter)),
        call_(call),
        rank_(rank),
        mine_(std::move(mine)) {}
  at::Tensor wait() override {
    mailbox_->wait(*letter_, rank_, call_);
    if (letter_->is_copied) letter_->is_copied->hold_current();
    return mine_;
  }

 private:
  std::shared_ptr<Mailbox> mailbox_;
  std::shared_ptr<Mailbox::Letter> letter_;
  Call call_;
  int rank_;  // of the world
  at::Tensor mine_;
};

std::unique_ptr<Work> Mailbox::bring(const Channel& channel, const Call& call, const at::Tensor& x,
                                     CommStream* queue) {
  const bool is_send = call.op == Collective::send;
  const auto is_there = queue ? queue->here() : nullptr;
  std::shared_ptr<Letter> letter;
  bool is_last = false;
  {
    const std::lock_guard lock(mutex_);
    auto& queue = waiting_[channel];
    is_last = !queue.empty() && (is_send ? queue.front()->out : queue.front()->x).defined();
    if (is_last) {
      letter = std::move(queue.front());
      queue.pop_front();
      letter->is_matched = true;
    } else {
      letter = queue.emplace_back(std::make_shared<Letter>());
    }
    (is_send ? letter->x : letter->out) = x;
    (is_send ? letter->x_is_there : letter->out_is_there) = is_there;
    (is_send ? letter->send : letter->recv) = call;
  }
  if (is_last) deliver(*letter, queue);
  const int rank = members_[static_cast<size_t>(is_send ? channel.from : channel.to)];
  return std::make_unique<LetterWork>(shared_from_this(), std::move(letter), call, rank, x);
}

void Mailbox::deliver(Letter& letter, CommStream* queue) {
  letter.verdict = disagreement(letter.send, letter.recv, group_);
  if (letter.verdict.empty() && letter.x.device() != letter.out.device())
    letter.verdict = detail::concat(
        "rank ", letter.recv.root, " has what it sends on ", letter.x.device(), " and rank ",
        letter.send.root, " receives on ", letter.out.device(), " (", letter.recv.describe(), ", ",
        letter.recv.place(group_), "). Ranks that are threads share one device.");
  try {
    const auto move = [to = letter.out, from = letter.x] {
      copy(whole(to), whole(from), from.options());
    };
    if (letter.verdict.empty() && queue) {
      queue->follow(*letter.x_is_there);
      queue->follow(*letter.out_is_there);
      queue->run(move);
      letter.is_copied = queue->mark();
    } else if (letter.verdict.empty()) {
      move();
    }
  } catch (const std::exception& e) {  // both ends learn of it, and neither waits on
    letter.verdict = detail::concat("the message was not copied: ", e.what());
  }
  letter.x.reset();
  letter.out.reset();
  {
    const std::lock_guard lock(mutex_);  // see `wake`
    letter.is_delivered.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

void Mailbox::wait(const Letter& letter, int rank, const Call& call) {
  const auto is_done = [&] { return letter.is_delivered.load(std::memory_order_acquire); };
  if (!is_done()) {
    const InSection waiting(Section::waiting);
    for (int i = 0; i < kYieldsBeforeBlocking && !is_done(); ++i) std::this_thread::yield();
    const auto world = world_.lock();
    MOESH_CHECK(world, ErrorKind::comm, call.describe(), " on group '", group_,
                "', whose world has ended");
    const auto deadline = Clock::now() + world->timeout();
    const std::vector<int> peer{call.root};
    std::unique_lock lock(mutex_);
    while (!is_done()) {
      // While the lock is held the other end cannot come, and so one that has left never did.
      if (!letter.is_matched) {
        std::string why = world->roll().reason(peer);
        if (why.empty() && Clock::now() >= deadline) why = too_late(peer, world->timeout());
        if (!why.empty()) give_up(rank, "", call, group_, why);
        changed_.wait_until(lock, deadline);
      } else {
        changed_.wait(lock);
      }
    }
  }
  MOESH_CHECK(letter.verdict.empty(), ErrorKind::comm, letter.verdict);
}

// A thread between its look and its sleep holds the lock.
void Mailbox::wake() {
  {
    const std::lock_guard lock(mutex_);
  }
  changed_.notify_all();
}

namespace {

using Clock = std::chrono::steady_clock;

// One exchange: what each rank posted, and which ranks have read everything.
struct Slot {
  struct RankEntry {
    Post post;
    std::shared_ptr<StreamOrigin> is_there;  // on a device: what the post sends
    std::shared_ptr<Mark> has_read;          // what was sent to this rank
    std::atomic<bool> posted = false, closed = false;
  };
  Slot(std::int64_t s, std::int32_t p, size_t size) : sequence(s), phase(p), entries(size) {}

  const std::int64_t sequence;
  const std::int32_t phase;
  std::vector<RankEntry> entries;
  std::atomic<size_t> num_posted = 0, num_closed = 0;
};
using Flag = std::atomic<bool> Slot::RankEntry::*;

}  // namespace

// Shared by the ranks of one group: the exchanges in progress.
class ThreadGroupState {
 public:
  ThreadGroupState(std::shared_ptr<ThreadWorld> world, std::string key, std::string name,
                   std::vector<int> members)
      : world_(world),
        key_(std::move(key)),
        name_(std::move(name)),
        members_(std::move(members)),
        mailbox_(std::make_shared<Mailbox>(world, name_, members_)) {}

  const std::string& key() const { return key_; }
  const std::string& name() const { return name_; }
  const std::vector<int>& members() const { return members_; }
  Mailbox& mailbox() { return *mailbox_; }

  std::shared_ptr<Slot> publish(int rank, Post post, std::shared_ptr<StreamOrigin> is_there) {
    const auto slot = slot_of(post.call);
    auto& mine = slot->entries[static_cast<size_t>(rank)];
    mine.post = std::move(post);
    mine.is_there = std::move(is_there);
    count(mine.posted, slot->num_posted);
    return slot;
  }

  // Blocks until all have posted, and returns what each sent to `rank`. From then on no rank
  // changes the posts.
  std::vector<Span> collect(int rank, const Slot& slot) {
    const auto me = static_cast<size_t>(rank);
    const Post& mine = slot.entries[me].post;
    wait_for(slot, slot.num_posted, &Slot::RankEntry::posted, rank, "");
    for (const auto& e : slot.entries)
      if (!e.post.call.agrees_with(mine.call)) throw_disagreement(slot);
    std::vector<Span> spans;
    spans.reserve(members_.size());
    for (size_t j = 0; j < members_.size(); ++j) {
      const Post& theirs = slot.entries[j].post;
      check_count(theirs.send[me].numel, mine.recv[j], mine.call, name_, members_[j], members_[me]);
      MOESH_CHECK(theirs.options.device() == mine.options.device(), ErrorKind::comm, "in ",
                  mine.call.describe(), ", operation ", mine.call.sequence, " of group '", name_,
                  "', rank ", members_[j], " has its tensor on ", theirs.options.device(),
                  " and rank ", members_[me], " on ", mine.options.device(),
                  ". Ranks that are threads share one device.");
      spans.push_back(theirs.send[me]);
    }
    return spans;
  }

  // This rank has read everything, or on a device will have at a mark. Blocks until the others
  // have, where the post says so; on a device the current stream waits for their marks.
  void close(int rank, Slot& slot, std::shared_ptr<Mark> has_read) {
    auto& mine = slot.entries[static_cast<size_t>(rank)];
    mine.has_read = std::move(has_read);
    if (count(mine.closed, slot.num_closed)) {
      std::lock_guard lock(mutex_);
      std::erase_if(slots_, [&](const auto& s) { return s.get() == &slot; });
    }
    if (mine.has_read) mine.has_read->hold_current();
    if (!mine.post.wait_for_readers) return;
    wait_for(slot, slot.num_closed, &Slot::RankEntry::closed, rank, "the end of ");
    for (const auto& e : slot.entries)
      if (e.has_read) e.has_read->hold_current();
    mine.post.keep.clear();  // a peer may hold the slot a little longer, and the memory is wanted
                             // for the next result
  }

  void wake_all() {
    wake();
    mailbox_->wake();
  }

 private:
  void wake() {
    // A thread between its look at the count and its sleep holds the lock.
    std::lock_guard lock(mutex_);
    if (num_blocked_ > 0) changed_.notify_all();
  }

  // True for the last one, which wakes the others.
  bool count(std::atomic<bool>& flag, std::atomic<size_t>& num) {
    flag.store(true, std::memory_order_release);
    if (num.fetch_add(1, std::memory_order_acq_rel) + 1 < members_.size()) return false;
    wake();
    return true;
  }

  std::shared_ptr<Slot> slot_of(const Call& call) {
    std::lock_guard lock(mutex_);
    for (const auto& s : slots_)
      if (s->sequence == call.sequence && s->phase == call.phase) return s;
    return slots_.emplace_back(std::make_shared<Slot>(call.sequence, call.phase, members_.size()));
  }

  void wait_for(const Slot& slot, const std::atomic<size_t>& num, Flag flag, int rank,
                const char* where) {
    const auto done = [&] { return num.load(std::memory_order_acquire) == members_.size(); };
    if (done()) return;
    const InSection waiting(Section::waiting);
    for (int i = 0; i < kYieldsBeforeBlocking; ++i) {
      if (done()) return;
      std::this_thread::yield();
    }
    const Call& call = slot.entries[static_cast<size_t>(rank)].post.call;
    const auto world = world_.lock();
    MOESH_CHECK(world, ErrorKind::comm, call.describe(), " on group '", name_,
                "', whose world has ended");
    const auto deadline = Clock::now() + world->timeout();
    std::unique_lock lock(mutex_);
    while (!done()) {
      const auto missing = missing_in(slot, flag);
      std::string why = missing.empty() ? "" : world->roll().reason(missing);
      if (why.empty() && !missing.empty() && Clock::now() >= deadline)
        why = too_late(missing, world->timeout());
      // One that came and then left may have done both since the first look.
      if (!why.empty() && missing_in(slot, flag) == missing)
        give_up(members_[static_cast<size_t>(rank)], where, call, name_, why);
      ++num_blocked_;
      changed_.wait_until(lock, why.empty() ? deadline : Clock::now());
      --num_blocked_;
    }
  }

  std::vector<int> missing_in(const Slot& slot, Flag flag) const {
    std::vector<int> missing;
    for (size_t j = 0; j < members_.size(); ++j)
      if (!(slot.entries[j].*flag).load(std::memory_order_acquire)) missing.push_back(members_[j]);
    return missing;
  }

  [[noreturn]] void throw_disagreement(const Slot& slot) const {
    std::vector<Call> calls;
    for (const auto& e : slot.entries) calls.push_back(e.post.call);
    throw Error(ErrorKind::comm, disagreement(calls, members_, name_));
  }

  const std::weak_ptr<ThreadWorld> world_;
  const std::string key_, name_;
  const std::vector<int> members_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_blocked_ = 0;
  std::vector<std::shared_ptr<Slot>> slots_;  // few: those in progress
  const std::shared_ptr<Mailbox> mailbox_;
};

namespace {

class ThreadExchange final : public Exchange {
 public:
  ThreadExchange(std::shared_ptr<ThreadGroupState> state, int rank, Post post, CommStream* queue)
      : state_(std::move(state)),
        rank_(rank),
        queue_(queue),
        slot_(state_->publish(rank_, std::move(post), queue ? queue->here() : nullptr)) {}
  std::vector<Span> receive() override {
    auto spans = state_->collect(rank_, *slot_);
    if (queue_)
      for (const auto& e : slot_->entries) queue_->follow(*e.is_there);
    return spans;
  }
  void run(const std::function<void()>& f) override { queue_ ? queue_->run(f) : f(); }
  void close() override { state_->close(rank_, *slot_, queue_ ? queue_->mark() : nullptr); }

 private:
  std::shared_ptr<ThreadGroupState> state_;
  int rank_;
  CommStream* queue_;
  std::shared_ptr<Slot> slot_;
};

// That of all groups of a rank, made when it is first needed: a rank has few streams.
class ReadQueue {
 public:
  explicit ReadQueue(MakeReadQueue make) : make_(std::move(make)) {}
  CommStream* on(at::Device device) {
    if (queue_ && device == device_) return queue_.get();
    auto made = make_(device);
    if (!made) return nullptr;
    device_ = device;
    queue_ = std::move(made);
    return queue_.get();
  }

 private:
  MakeReadQueue make_;
  at::Device device_ = at::kCPU;
  std::unique_ptr<CommStream> queue_;
};

class ThreadGroup final : public HostGroup {
 public:
  ThreadGroup(std::shared_ptr<ThreadWorld> world, std::shared_ptr<ThreadGroupState> state, int rank,
              std::shared_ptr<ReadQueue> queue)
      : HostGroup(state->name(), rank, state->members()),
        world_(std::move(world)),
        state_(std::move(state)),
        queue_(std::move(queue)) {}

 private:
  std::unique_ptr<Exchange> post(Post post) override {
    CommStream* const queue = queue_->on(post.options.device());
    return std::make_unique<ThreadExchange>(state_, rank(), std::move(post), queue);
  }
  std::unique_ptr<Work> do_send(const at::Tensor& x, const Message& m) override {
    const Call call = call_of(Collective::send, x.scalar_type(), x.sizes(), m);
    return state_->mailbox().bring({rank(), m.peer}, call, x, queue_->on(x.device()));
  }
  std::unique_ptr<Work> do_recv(at::IntArrayRef sizes, const at::TensorOptions& options,
                                const Message& m) override {
    const at::Tensor out = empty_result(sizes, options);
    const Call call = call_of(Collective::recv, out.scalar_type(), sizes, m);
    return state_->mailbox().bring({m.peer, rank()}, call, out, queue_->on(out.device()));
  }
  std::shared_ptr<Group> do_split(const std::vector<int>& members, int rank, int index,
                                  const std::string& name) override {
    const std::string key = detail::concat(state_->key(), "/", num_splits_++, ".", index);
    if (members.size() <= 1) return nullptr;
    return std::make_shared<ThreadGroup>(world_, world_->state(key, name, world_ranks(members)),
                                         rank, queue_);
  }

  std::shared_ptr<ThreadWorld> world_;
  std::shared_ptr<ThreadGroupState> state_;
  std::shared_ptr<ReadQueue> queue_;
  int num_splits_ = 0;
};

}  // namespace

std::unique_ptr<CommStream> queue_off_the_host(at::Device device) {
  return device.is_cpu() ? nullptr : device_stream(device);
}

ThreadWorld::ThreadWorld(int num_ranks, std::chrono::milliseconds timeout, MakeReadQueue make_queue)
    : num_ranks_(num_ranks),
      timeout_(timeout),
      make_queue_(std::move(make_queue)),
      roll_(num_ranks) {}

std::shared_ptr<ThreadWorld> ThreadWorld::create(int num_ranks, std::chrono::milliseconds timeout,
                                                 MakeReadQueue make_queue) {
  MOESH_CHECK(num_ranks >= 1, ErrorKind::config, "a world of ", num_ranks,
              " ranks; it takes 1 or more");
  return std::shared_ptr<ThreadWorld>(new ThreadWorld(num_ranks, timeout, std::move(make_queue)));
}

std::shared_ptr<Group> ThreadWorld::group(int rank) {
  std::vector<int> members(static_cast<size_t>(num_ranks_));
  std::iota(members.begin(), members.end(), 0);
  return std::make_shared<ThreadGroup>(shared_from_this(), state("world", "world", members), rank,
                                       std::make_shared<ReadQueue>(make_queue_));
}

std::shared_ptr<ThreadGroupState> ThreadWorld::state(const std::string& key,
                                                     const std::string& name,
                                                     const std::vector<int>& members) {
  std::lock_guard lock(mutex_);
  auto& state = states_[key];
  if (!state) state = std::make_shared<ThreadGroupState>(shared_from_this(), key, name, members);
  return state;
}

void ThreadWorld::leave(int rank, std::exception_ptr fault) {
  roll_.ended(rank, fault);
  std::lock_guard lock(mutex_);
  for (const auto& [key, state] : states_) state->wake_all();
}

}  // namespace moesh::comm
