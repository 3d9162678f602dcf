#include "moesh/comm/nccl/world.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/base/timeline.h"

namespace moesh::comm {
namespace {

using namespace std::chrono_literals;

// How often the watchdog looks. Deadlines are seconds to minutes.
constexpr auto kFailureLook = 10ms;
constexpr auto kGuardLook = 100ms;
// Communicators that are aborted have at least this long.
constexpr std::chrono::milliseconds kLeastToEnd = 10s;

// Between two questions: at first hardly at all, since most answers come within microseconds.
void pause(int num_asked) {
  if (num_asked < 50)
    std::this_thread::yield();
  else
    std::this_thread::sleep_for(std::min<std::chrono::microseconds>(1ms, num_asked * 1us));
}

std::string describe(const NcclTicket& ticket) {
  return detail::concat(ticket.call.describe(), ", ", ticket.call.place(ticket.group->name));
}

}  // namespace

NcclWorld::NcclWorld(std::shared_ptr<const NcclApi> api, at::Device device, int rank,
                     std::chrono::milliseconds timeout, bool block_host)
    : api_(std::move(api)),
      device_(device),
      rank_(rank),
      timeout_(timeout),
      block_host_(block_host),
      num_exceptions_(std::uncaught_exceptions()),
      stream_(api_->make_stream(device)),
      watchdog_([this] { watch(); }),
      guard_([this] { guard(); }) {}

NcclWorld::~NcclWorld() {
  try {
    if (std::uncaught_exceptions() > num_exceptions_) stop("an exception has ended the world");
    bool is_over = false;
    {
      std::lock_guard lock(state_);
      is_over = !fault_.empty();
    }
    if (is_over)
      drain();
    else
      close();
  } catch (const std::exception& e) {
    log_warn("the end of an NCCL world: ", e.what());
    stop("its end has failed");
  }
  channels_.clear();  // nothing holds up their threads any more
  {
    std::lock_guard lock(state_);
    ending_ = true;
  }
  changed_.notify_all();
  watchdog_.join();
  guard_.join();
}

// The watchdog takes the tickets out, and stops what is late. After that NCCL's kernels give up
// within moments.
void NcclWorld::drain() {
  std::unique_lock lock(state_);
  for (const auto& ticket : tickets_)
    if (!ticket->since) ticket->since = Clock::now();
  while (!changed_.wait_for(lock, 5s, [&] { return tickets_.empty(); }))
    if (!fault_.empty()) return;
}

void NcclWorld::close() {
  drain();
  throw_if_stopped();
  const c10::DeviceGuard guard(device_);
  const auto is_over = [deadline = Clock::now() + timeout_] { return Clock::now() >= deadline; };
  std::unique_lock calls(calls_);
  while (true) {
    Member member;
    {
      std::lock_guard lock(state_);
      if (members_.empty()) {
        if (fault_.empty())
          fault_ = "this NCCL world has ended; its groups cannot be used after that";
        return;
      }
      member = members_.front();
    }
    settle(calls, member, api_->comm_finalize(member.comm), is_over,
           [&] { return detail::concat("the end of group '", member.group->name, "'"); });
    {
      std::lock_guard lock(state_);
      members_.erase(members_.begin());
    }
    api_->comm_destroy(member.comm);
  }
}

NcclUniqueId NcclWorld::new_id() {
  NcclUniqueId id{};
  const NcclResult result = api_->get_unique_id(&id);
  MOESH_CHECK(result == NcclResult::success, ErrorKind::comm, "rank ", rank_,
              " got no NCCL id: ", error_text(result, nullptr));
  return id;
}

NcclComm NcclWorld::join(const NcclUniqueId& id, int rank,
                         std::shared_ptr<const NcclGroupInfo> group) {
  throw_if_stopped();
  const c10::DeviceGuard guard(device_);
  const auto is_over = [deadline = Clock::now() + timeout_] { return Clock::now() >= deadline; };
  std::unique_lock calls(calls_);
  NcclComm comm = nullptr;
  const NcclResult result =
      api_->comm_init_rank(&comm, static_cast<int>(group->members.size()), id, rank);
  if (comm) {
    std::unique_lock lock(state_);
    if (fault_.empty())
      members_.push_back({comm, group});
    else
      api_->comm_abort(comm);
  }
  throw_if_stopped();
  settle(calls, {comm, group}, result, is_over,
         [&] { return detail::concat("the start of group '", group->name, "'"); });
  return comm;
}

NcclChannel& NcclWorld::new_channel(NcclComm comm, std::shared_ptr<const NcclGroupInfo> ends) {
  return *channels_.emplace_back(std::make_unique<NcclChannel>(*this, comm, std::move(ends)));
}

std::shared_ptr<NcclTicket> NcclWorld::new_ticket(NcclComm comm, const Call& call,
                                                  std::shared_ptr<const NcclGroupInfo> group,
                                                  std::vector<at::Tensor> keep,
                                                  std::shared_ptr<const NcclTicket> message) {
  auto ticket = std::make_shared<NcclTicket>();
  ticket->comm = comm, ticket->call = call, ticket->group = std::move(group);
  ticket->keep = std::move(keep), ticket->message = std::move(message);
  if (!call.is_message()) ticket->since = ticket->called;
  {
    std::lock_guard lock(state_);
    tickets_.push_back(ticket);
  }
  changed_.notify_all();
  return ticket;
}

void NcclWorld::issue(CommStream& stream, NcclTicket& ticket, const StreamOrigin& origin,
                      const Issue& issue, const std::function<void()>& after) {
  std::shared_ptr<Mark> mark;
  {
    std::unique_lock calls(calls_);
    throw_if_stopped();
    stream.follow(origin);
    const NcclResult result = issue(*api_, ticket.comm, stream.handle());
    const auto is_late = [&] {
      const std::lock_guard lock(state_);
      return this->is_late(ticket);
    };
    settle(calls, {ticket.comm, ticket.group}, result, is_late, [&] { return describe(ticket); });
    if (after) stream.run(after);
    mark = stream.mark(origin);
  }
  {
    std::lock_guard lock(state_);
    ticket.mark = std::move(mark);
  }
  changed_.notify_all();
}

std::shared_ptr<NcclTicket> NcclWorld::enqueue(NcclComm comm, const Call& call,
                                               std::shared_ptr<const NcclGroupInfo> group,
                                               std::vector<at::Tensor> keep, const Issue& issue,
                                               const std::function<void()>& after) {
  const c10::DeviceGuard guard(device_);
  throw_if_stopped();
  auto ticket = new_ticket(comm, call, std::move(group), std::move(keep));
  try {
    this->issue(*stream_, *ticket, *stream_->here(), issue, after);
  } catch (...) {
    std::lock_guard lock(state_);
    std::erase(tickets_, ticket);
    throw;
  }
  return ticket;
}

std::shared_ptr<Mark> NcclWorld::taken(const NcclTicket& ticket) {
  std::unique_lock lock(state_);
  changed_.wait(lock, [&] { return ticket.mark || !fault_.empty(); });
  if (!fault_.empty()) throw Error(ErrorKind::comm, fault_);
  return ticket.mark;
}

void NcclWorld::wait(NcclTicket& ticket) {
  const InSection waiting(Section::waiting);
  {
    const std::lock_guard lock(state_);
    if (!ticket.since) ticket.since = Clock::now();
  }
  const auto mark = taken(ticket);
  if (block_host_) finish(ticket);
  mark->hold_current();
  throw_if_stopped();
  ticket.keep.clear();
}

void NcclWorld::finish(const NcclTicket& ticket) {
  const auto mark = taken(ticket);
  for (int asked = 0; !mark->done(); ++asked) {
    throw_if_stopped();
    pause(asked);
  }
  std::unique_lock calls(calls_);
  throw_if_stopped();
  const NcclResult state = state_of(ticket.comm);
  // In progress: a later message of its channel.
  if (state == NcclResult::success || state == NcclResult::in_progress) return;
  const std::string text = detail::concat("rank ", rank_, ", in ", describe(ticket), ": ",
                                          error_text(state, ticket.comm));
  calls.unlock();
  stop(text);
  throw_if_stopped();
}

void NcclWorld::stop(const std::string& reason) {
  std::vector<Member> members;
  {
    std::lock_guard lock(state_);
    if (!fault_.empty()) return;
    fault_ = reason;
    members.swap(members_);
    if (asks_since_) asks_since_ = Clock::now();  // ending has a time of its own
  }
  changed_.notify_all();
  // A rank that queues behind a stuck kernel can itself be stuck in a call, with the lock, until
  // the kernel is aborted: after a second NCCL is aborted without it.
  std::unique_lock calls(calls_, std::try_to_lock);
  for (int i = 0; i < 1000 && !calls; ++i) {
    std::this_thread::sleep_for(1ms);
    (void)calls.try_lock();
  }
  for (const Member& m : members) api_->comm_abort(m.comm);
}

void NcclWorld::throw_if_stopped() const {
  std::lock_guard lock(state_);
  if (!fault_.empty()) throw Error(ErrorKind::comm, fault_);
}

std::string NcclWorld::late(const std::string& what, const NcclGroupInfo& group) const {
  return detail::concat(
      "rank ", rank_, " waited in ", what, ": it was not done within ",
      std::chrono::duration<double>(timeout_).count(), " s. One of the ranks ", group.members,
      " did not arrive, or called something else (NCCL cannot tell; `checked` groups can).");
}

std::string NcclWorld::error_text(NcclResult result, NcclComm comm) const {
  const char* last = comm ? api_->last_error(comm) : nullptr;
  return detail::concat("NCCL answered ", static_cast<int>(result), " (",
                        api_->error_string(result), ")",
                        last && *last ? detail::concat(": ", last) : "");
}

// Errors that NCCL has found by itself since the last call. The lock for calls is held.
NcclResult NcclWorld::state_of(NcclComm comm) const {
  NcclResult state = NcclResult::success;
  const NcclResult result = api_->get_async_error(comm, &state);
  return result == NcclResult::success ? state : result;
}

// Waits until the communicator takes calls again. The lock is free between two questions, so that
// `stop` gets through.
void NcclWorld::settle(std::unique_lock<std::mutex>& calls, const Member& member, NcclResult result,
                       const IsLate& is_late, const What& what) {
  for (int asked = 0; result == NcclResult::in_progress; ++asked) {
    if (is_late()) {
      calls.unlock();
      stop(late(what(), *member.group));
      throw_if_stopped();
    }
    calls.unlock();
    pause(asked);
    calls.lock();
    throw_if_stopped();
    result = state_of(member.comm);
  }
  if (result == NcclResult::success) return;
  const std::string text =
      detail::concat("rank ", rank_, ", in ", what(), ": ", error_text(result, member.comm));
  calls.unlock();
  stop(text);
  throw_if_stopped();
}

// While others of this rank end, it is their turn: on a device they wait for each other, whenever
// the host has called them. The lock of the state is held.
bool NcclWorld::is_late(const NcclTicket& ticket) const {
  const NcclTicket& whole = ticket.message ? *ticket.message : ticket;
  // A message may never be awaited: its rank may hang behind it, in a call that waits
  // for the whole device.
  constexpr int kUnasked = 10;
  const auto due = whole.since ? std::max(*whole.since, last_end_) + timeout_
                               : std::max(whole.called, last_end_) + kUnasked * timeout_;
  return Clock::now() >= due;
}

void NcclWorld::watch() {
  set_log_rank(rank_);
  const c10::DeviceGuard guard(device_);
  std::unique_lock lock(state_);
  while (true) {
    changed_.wait(lock, [&] { return ending_ || !tickets_.empty(); });
    if (ending_) return;
    changed_.wait_for(lock, kFailureLook, [&] { return ending_; });
    asks_since_ = Clock::now();
    lock.unlock();
    look();
    lock.lock();
    asks_since_.reset();
  }
}

// A device can keep the watchdog itself: loading a kernel may wait for kernels that wait for other
// ranks, and every other call of CUDA in the process waits behind it. No thread can be brought back
// from there, so the process says what it was doing and ends.
// It counts its own looks: the clock also goes on while the process is stopped.
void NcclWorld::guard() {
  std::unique_lock lock(state_);
  std::optional<Clock::time_point> seen;
  for (std::int64_t looks = 0; !changed_.wait_for(lock, kGuardLook, [&] { return ending_; });) {
    if (asks_since_ != seen) seen = asks_since_, looks = 0;
    const auto limit = fault_.empty() ? timeout_ : std::max(timeout_, kLeastToEnd);
    if (!seen || ++looks * kGuardLook < limit) continue;
    const std::string what = tickets_.empty() ? "the end of a fault" : describe(*tickets_.front());
    const double seconds = std::chrono::duration<double>(timeout_).count();
    std::fprintf(
        stderr,
        "moesh: comm error: rank %d, in %s: the device %s has not answered for %g s. Kernels "
        "that wait for another rank can keep others from being loaded: set "
        "CUDA_MODULE_LOADING=EAGER if it is not. The last calls of this rank:\n%s\n",
        rank_, what.c_str(), device_.str().c_str(), seconds, flight::text(*recorder_).c_str());
    std::_Exit(static_cast<int>(ExitCode::lost_rank));
  }
}

void NcclWorld::look() {
  std::vector<std::pair<std::shared_ptr<NcclTicket>, std::shared_ptr<Mark>>> tickets;
  {
    std::lock_guard lock(state_);
    for (const auto& ticket : tickets_) tickets.emplace_back(ticket, ticket->mark);
  }
  if (tickets.empty()) return;
  const auto first = tickets.front().first;
  std::string fault;
  if (std::unique_lock calls(calls_, std::try_to_lock);
      calls) {  // a rank that is in a call sees its errors itself
    std::lock_guard lock(state_);
    for (const auto& [comm, group] : members_) {
      const NcclResult state = state_of(comm);
      if (state == NcclResult::success || state == NcclResult::in_progress) continue;
      fault = detail::concat("rank ", rank_, ", in ", describe(*first),
                             " or after it: ", error_text(state, comm));
      break;
    }
  }
  if (!fault.empty()) stop(fault);
  // A message that was started early may end after many collectives: all are asked.
  try {
    std::erase_if(tickets, [](const auto& t) { return !t.second || !t.second->done(); });
  } catch (const std::exception& e) {
    // The device itself has failed; nothing on it will end any more.
    stop(detail::concat("rank ", rank_, ", in ", describe(*first), ": ", e.what()));
    std::lock_guard lock(state_);
    tickets_.clear();
    changed_.notify_all();
    return;
  }
  std::shared_ptr<NcclTicket> late;  // memory that tickets still kept goes outside the lock
  {
    std::lock_guard lock(state_);
    for (const auto& [ticket, mark] : tickets) std::erase(tickets_, ticket);
    if (!tickets.empty()) last_end_ = Clock::now();
    const auto found =
        std::find_if(tickets_.begin(), tickets_.end(), [&](const auto& t) { return is_late(*t); });
    if (found != tickets_.end()) late = *found;
    // Calls that a channel had not made when the world ended are never made.
    if (!fault_.empty()) std::erase_if(tickets_, [](const auto& t) { return !t->mark; });
  }
  changed_.notify_all();
  if (late) stop(this->late(describe(*late), *late->group));
}

}  // namespace moesh::comm
