#include "moesh/comm/threads/mailbox.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "moesh/base/error.h"
#include "moesh/base/sections.h"
#include "moesh/comm/roll.h"
#include "moesh/comm/threads/thread_world.h"

namespace moesh::comm {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

// One message. What the ends bring is written before both are there, and then by nobody.
struct Mailbox::Letter {
  Call send, recv;
  at::Tensor x, out;
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
    return mine_;
  }

 private:
  std::shared_ptr<Mailbox> mailbox_;
  std::shared_ptr<Mailbox::Letter> letter_;
  Call call_;
  int rank_;  // of the world
  at::Tensor mine_;
};

std::unique_ptr<Work> Mailbox::bring(const Channel& channel, const Call& call,
                                     const at::Tensor& x) {
  const bool is_send = call.op == Collective::send;
  synchronize(x.device());
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
    (is_send ? letter->send : letter->recv) = call;
  }
  if (is_last) deliver(*letter);
  const int rank = members_[static_cast<size_t>(is_send ? channel.from : channel.to)];
  return std::make_unique<LetterWork>(shared_from_this(), std::move(letter), call, rank, x);
}

void Mailbox::deliver(Letter& letter) {
  letter.verdict = disagreement(letter.send, letter.recv, group_);
  if (letter.verdict.empty() && letter.x.device() != letter.out.device())
    letter.verdict = detail::concat(
        "rank ", letter.recv.root, " has what it sends on ", letter.x.device(), " and rank ",
        letter.send.root, " receives on ", letter.out.device(), " (", letter.recv.describe(), ", ",
        letter.recv.place(group_), "). Ranks that are threads share one device.");
  try {
    if (letter.verdict.empty()) {
      copy(whole(letter.out), whole(letter.x), letter.x.options());
      synchronize(letter.x.device());
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

}  // namespace moesh::comm
