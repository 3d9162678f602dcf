#include "moesh/comm/threads/thread_world.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <numeric>

#include "moesh/base/error.h"

namespace moesh::comm {
namespace {

using Clock = std::chrono::steady_clock;

// Work on an accelerator is asynchronous; peers may touch the memory only when it is done.
void synchronize(const at::Device& device) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.getStream(device).synchronize();
}

}  // namespace

// What the ranks of one group share: the exchanges under way, by (sequence, phase).
class ThreadGroupState {
 public:
  using Key = std::pair<std::int64_t, std::int32_t>;

  ThreadGroupState(std::shared_ptr<ThreadWorld> world, std::string key, std::string name, std::vector<int> members)
      : world_(world), key_(std::move(key)), name_(std::move(name)), members_(std::move(members)) {}

  const std::string& key() const { return key_; }
  const std::string& name() const { return name_; }
  const std::vector<int>& members() const { return members_; }
  std::shared_ptr<ThreadWorld> world() const { return world_.lock(); }

  void publish(int rank, Post post) {
    const Key key{post.call.sequence, post.call.phase};
    std::lock_guard lock(mutex_);
    auto& slot = slots_[key];
    if (slot.posts.empty()) slot.posts.resize(members_.size());
    slot.posts[static_cast<size_t>(rank)] = std::make_unique<Post>(std::move(post));
    if (++slot.num_posted == members_.size()) changed_.notify_all();
  }

  // Blocks until all have posted, and returns what each sent to `rank`.
  std::vector<Block> collect(int rank, const Call& call) {
    Slot& slot = wait_for(rank, call, "", [](const Slot& s, size_t n) { return s.num_posted == n; },
                          [](const Slot& s, size_t j) { return s.posts.empty() || !s.posts[j]; });
    // All posts are there and nobody changes them before everyone has closed: no lock is needed to read them.
    std::vector<Call> calls;
    for (const auto& p : slot.posts) calls.push_back(p->call);
    const std::string verdict = disagreement(calls, members_, name_);
    MOESH_CHECK(verdict.empty(), ErrorKind::comm, verdict);
    const Post& mine = *slot.posts[static_cast<size_t>(rank)];
    std::vector<Block> blocks;
    for (size_t j = 0; j < slot.posts.size(); ++j) {
      const Block& b = slot.posts[j]->send[static_cast<size_t>(rank)];
      MOESH_CHECK(b.numel == mine.recv[j], ErrorKind::comm, "in ", call.describe(), ", operation ", call.sequence, " of group '",
                  name_, "', rank ", members_[j], " sends ", b.numel, " elements and rank ", members_[static_cast<size_t>(rank)],
                  " expects ", mine.recv[j], ". Every rank must pass the same rows.");
      MOESH_CHECK(slot.posts[j]->options.device() == mine.options.device(), ErrorKind::comm, "in ", call.describe(), ", operation ",
                  call.sequence, " of group '", name_, "', rank ", members_[j], " has its tensor on ", slot.posts[j]->options.device(),
                  " and rank ", members_[static_cast<size_t>(rank)], " on ", mine.options.device(),
                  ". Ranks that are threads share one device.");
      blocks.push_back(b);
    }
    return blocks;
  }

  // Blocks until all have read what this rank sent.
  void close(int rank, const Call& call) {
    const Key key{call.sequence, call.phase};
    {
      std::lock_guard lock(mutex_);
      auto& slot = slots_.at(key);
      if (slot.closed.empty()) slot.closed.resize(members_.size());
      slot.closed[static_cast<size_t>(rank)] = true;
      if (++slot.num_closed == members_.size()) changed_.notify_all();
    }
    wait_for(rank, call, "the end of ", [](const Slot& s, size_t n) { return s.num_closed == n; },
             [](const Slot& s, size_t j) { return !s.closed[j]; });
    std::lock_guard lock(mutex_);
    auto& slot = slots_.at(key);
    if (++slot.num_gone == members_.size()) slots_.erase(key);
  }

  void wake() {
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

 private:
  struct Slot {
    std::vector<std::unique_ptr<Post>> posts;
    std::vector<bool> closed;
    size_t num_posted = 0, num_closed = 0, num_gone = 0;
  };

  template <class Done, class Missing>
  Slot& wait_for(int rank, const Call& call, const char* where, Done done, Missing is_missing) {
    const auto world = this->world();
    const auto deadline = Clock::now() + world->timeout();
    std::unique_lock lock(mutex_);
    Slot& slot = slots_[{call.sequence, call.phase}];
    while (!done(slot, members_.size())) {
      std::vector<int> missing;
      for (size_t j = 0; j < members_.size(); ++j)
        if (is_missing(slot, j)) missing.push_back(members_[j]);
      // The world's lock is taken inside the group's: `leave` never holds both.
      std::string why = world->reason(missing);
      const bool late = Clock::now() >= deadline;
      if (why.empty() && late)
        why = detail::concat(missing.size() == 1 ? "rank " : "ranks ", missing, " did not come within ",
                             std::chrono::duration<double>(world->timeout()).count(), " s");
      MOESH_CHECK(why.empty(), ErrorKind::comm, "rank ", members_[static_cast<size_t>(rank)], " waited in ", where, call.describe(),
                  ", operation ", call.sequence, " of group '", name_, "': ", why);
      changed_.wait_until(lock, deadline);
    }
    return slot;
  }

  const std::weak_ptr<ThreadWorld> world_;
  const std::string key_, name_;
  const std::vector<int> members_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, Slot> slots_;
};

namespace {

class ThreadExchange final : public Exchange {
 public:
  ThreadExchange(std::shared_ptr<ThreadGroupState> state, int rank, Post post)
      : state_(std::move(state)), rank_(rank), call_(post.call), device_(post.options.device()) {
    synchronize(device_);
    state_->publish(rank_, std::move(post));
  }
  std::vector<Block> receive() override { return state_->collect(rank_, call_); }
  void close() override {
    synchronize(device_);
    state_->close(rank_, call_);
  }

 private:
  std::shared_ptr<ThreadGroupState> state_;
  int rank_;
  Call call_;
  at::Device device_;
};

class ThreadGroup final : public HostGroup {
 public:
  using MakeState = std::function<std::shared_ptr<ThreadGroupState>(const std::string& key, const std::string& name,
                                                                    const std::vector<int>& members)>;
  ThreadGroup(std::shared_ptr<ThreadGroupState> state, int rank, std::shared_ptr<ThreadWorld> world, MakeState make)
      : HostGroup(state->name(), rank, state->members()), state_(std::move(state)), world_(std::move(world)), make_(std::move(make)) {}

 private:
  std::unique_ptr<Exchange> post(Post post) override {
    return std::make_unique<ThreadExchange>(state_, rank(), std::move(post));
  }
  std::shared_ptr<Group> do_split(const std::vector<int>& members, int rank, int index, const std::string& name) override {
    const std::string key = detail::concat(state_->key(), "/", num_splits_++, ".", index);
    if (members.size() <= 1) return nullptr;
    return std::make_shared<ThreadGroup>(make_(key, name, world_ranks(members)), rank, world_, make_);
  }

  std::shared_ptr<ThreadGroupState> state_;
  std::shared_ptr<ThreadWorld> world_;
  MakeState make_;
  int num_splits_ = 0;
};

}  // namespace

ThreadWorld::ThreadWorld(int num_ranks, std::chrono::milliseconds timeout)
    : num_ranks_(num_ranks), timeout_(timeout), left_(static_cast<size_t>(num_ranks)) {}

std::shared_ptr<ThreadWorld> ThreadWorld::create(int num_ranks, std::chrono::milliseconds timeout) {
  MOESH_CHECK(num_ranks >= 1, ErrorKind::config, "a world of ", num_ranks, " ranks; it takes 1 or more");
  return std::shared_ptr<ThreadWorld>(new ThreadWorld(num_ranks, timeout));
}

std::shared_ptr<Group> ThreadWorld::group(int rank) {
  std::vector<int> members(static_cast<size_t>(num_ranks_));
  std::iota(members.begin(), members.end(), 0);
  auto self = shared_from_this();
  auto make = [self](const std::string& key, const std::string& name, const std::vector<int>& m) {
    return self->state(key, name, m);
  };
  return std::make_shared<ThreadGroup>(state("world", "world", members), rank, self, make);
}

std::shared_ptr<ThreadGroupState> ThreadWorld::state(const std::string& key, const std::string& name,
                                                     const std::vector<int>& members) {
  std::lock_guard lock(mutex_);
  auto& state = states_[key];
  if (!state) state = std::make_shared<ThreadGroupState>(shared_from_this(), key, name, members);
  return state;
}

void ThreadWorld::leave(int rank, std::exception_ptr fault) {
  std::vector<std::shared_ptr<ThreadGroupState>> states;
  {
    std::lock_guard lock(mutex_);
    left_[static_cast<size_t>(rank)] = true;
    if (fault && !fault_) {
      fault_ = fault;
      faulty_rank_ = rank;
      try {
        std::rethrow_exception(fault);
      } catch (const std::exception& e) {
        fault_text_ = e.what();
      } catch (...) {
        fault_text_ = "an exception that is not a std::exception";
      }
    }
    for (const auto& [key, state] : states_) states.push_back(state);
  }
  for (const auto& state : states) state->wake();
}

std::exception_ptr ThreadWorld::first_fault() const {
  std::lock_guard lock(mutex_);
  return fault_;
}

std::string ThreadWorld::reason(const std::vector<int>& missing) const {
  std::lock_guard lock(mutex_);
  if (fault_) return detail::concat("rank ", faulty_rank_, " failed: ", fault_text_);
  for (int r : missing)
    if (left_[static_cast<size_t>(r)]) return detail::concat("rank ", r, " has returned and will not come");
  return {};
}

}  // namespace moesh::comm
