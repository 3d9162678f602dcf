#include "moesh/comm/mpi/world.h"

#include <cstring>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/base/sections.h"

namespace moesh::comm::mpi {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kGrace{50};  // what was sent before bad news may still be on its way
constexpr milliseconds kLinger{
    2000};                   // after a fault, for the other processes to say what they have to say
constexpr int kNewsTag = 0;  // tags of spans are positive

}  // namespace

MpiWorld::MpiWorld(Process& process, int num_ranks, milliseconds timeout)
    : process_(process),
      num_ranks_(num_ranks),
      per_process_(num_ranks / process.size()),
      timeout_(timeout),
      roll_(num_ranks) {
  while ((1 << thread_bits_) < per_process_) ++thread_bits_;
  meet();
  listen_again();
}

void MpiWorld::wait(const std::function<bool()>& is_done,
                    const std::function<std::vector<int>()>& missing, const Call& call,
                    const GroupInfo& group, const char* where) {
  const InSection waiting(Section::waiting);
  const auto deadline = Clock::now() + timeout_;
  auto bad_news = Clock::time_point::max();
  for (Backoff backoff;; backoff.pause()) {
    listen();
    group.of_rank->advance();
    if (is_done()) return;
    const auto now = Clock::now();
    std::string why = roll_.reason(missing());
    if (why.empty()) {
      if (now < deadline) continue;
      why = too_late(missing(), timeout_);
    } else {
      bad_news = std::min(bad_news, now);
      if (now < bad_news + kGrace) continue;
    }
    give_up(group.world_rank(), where, call, group.name, why);
  }
}

void MpiWorld::wait(Requests& requests, const Call& call, const GroupInfo& group,
                    const char* where) {
  const auto missing = [&] {
    std::vector<int> ranks;
    for (int peer : requests.missing()) ranks.push_back(group.members[static_cast<size_t>(peer)]);
    return ranks;
  };
  wait([&] { return requests.test(); }, missing, call, group, where);
}

void MpiWorld::leave(int rank, std::exception_ptr fault) {
  auto news = std::make_unique<News>();
  news->rank = rank;
  if (fault) {
    const std::string text = text_of(fault);
    news->failed = 1;
    news->kind = kind_of(fault);
    std::memcpy(news->text, text.data(), std::min(text.size(), sizeof(news->text) - 1));
    roll_.threw(rank, fault);
  } else {
    roll_.returned(rank);
  }
  std::lock_guard lock(sending_);
  for (int p = 0; p < process_.size(); ++p) {
    if (p == process_.index()) continue;
    const int code =
        MPI_Isend(news.get(), sizeof(News), MPI_BYTE, p, kNewsTag, comm_, outbox_->requests.add(p));
    if (code != MPI_SUCCESS)
      log_warn("MPI process ", p, " could not be told that rank ", rank, " has ended");
  }
  outbox_->news.push_back(std::move(news));
}

void MpiWorld::finish() {
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
  roll_.rethrow_first();
  check_mpi(MPI_Comm_free(&comm_), "MPI_Comm_free");
}

void MpiWorld::meet() {
  const Buffers<Meeting> meeting(new Meeting);
  greet(*meeting);
  process_.unusable = true;  // if this is given up, communicators would not match any more
  check_mpi(MPI_Comm_idup(process_.comm(), &meeting->comm, meeting->requests.add(process_.index())),
            "MPI_Comm_idup");
  complete(meeting->requests, "the start of a world");
  process_.unusable = false;
  comm_ = meeting->comm;
}

void MpiWorld::greet(Meeting& m) {
  m.mine = {process_.num_launches, num_ranks_};
  m.theirs.resize(static_cast<size_t>(process_.size()));
  const int tag = static_cast<int>(process_.num_launches & 0x3fff);
  for (int p = 0; p < process_.size(); ++p) {
    if (p == process_.index()) continue;
    check_mpi(MPI_Irecv(&m.theirs[static_cast<size_t>(p)], sizeof(Greeting), MPI_BYTE, p, tag,
                        process_.comm(), m.requests.add(p)),
              "MPI_Irecv");
    check_mpi(
        MPI_Isend(&m.mine, sizeof(Greeting), MPI_BYTE, p, tag, process_.comm(), m.requests.add(p)),
        "MPI_Isend");
  }
  complete(m.requests, "launch");
  for (int p = 0; p < process_.size(); ++p) {
    const auto& theirs = m.theirs[static_cast<size_t>(p)];
    MOESH_CHECK(p == process_.index() ||
                    (theirs.launch == m.mine.launch && theirs.num_ranks == m.mine.num_ranks),
                ErrorKind::config, "MPI process ", process_.index(), " launches ", m.mine.num_ranks,
                " ranks as world ", m.mine.launch, ", and process ", p, " ", theirs.num_ranks,
                " as world ", theirs.launch, ". All processes must make the same calls of launch.");
  }
}

void MpiWorld::complete(Requests& requests, const char* what) {
  const auto deadline = Clock::now() + timeout_;
  for (Backoff backoff; !requests.test(); backoff.pause())
    MOESH_CHECK(Clock::now() < deadline, ErrorKind::comm, "MPI process ", process_.index(),
                " waited in ", what, ": of ", process_.size(), " processes ", requests.missing(),
                " did not come within ", std::chrono::duration<double>(timeout_).count(), " s");
}

void MpiWorld::listen() {
  std::unique_lock lock(listening_, std::try_to_lock);
  if (!lock) return;
  for (;;) {
    int heard = 0;
    check_mpi(MPI_Test(&incoming_, &heard, MPI_STATUS_IGNORE), "MPI_Test");
    if (!heard) return;
    if (inbox_->failed) {
      roll_.failed(inbox_->rank, inbox_->text, inbox_->kind);
    } else {
      roll_.returned(inbox_->rank);
    }
    listen_again();
  }
}

void MpiWorld::listen_again() {
  check_mpi(
      MPI_Irecv(inbox_.get(), sizeof(News), MPI_BYTE, MPI_ANY_SOURCE, kNewsTag, comm_, &incoming_),
      "MPI_Irecv");
}

void MpiWorld::hang_up() {
  check_mpi(MPI_Cancel(&incoming_), "MPI_Cancel");
  check_mpi(MPI_Wait(&incoming_, MPI_STATUS_IGNORE), "MPI_Wait");
}

void check_usable(const MpiWorld& world, const GroupInfo& group, const Call& call) {
  MOESH_CHECK(!world.roll().has_left(group.world_rank()), ErrorKind::comm, call.describe(),
              " on group '", group.name, "', whose world has ended");
}

}  // namespace moesh::comm::mpi
