#include "moesh/comm/mpi/world.h"

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/base/timeline.h"
#include "moesh/comm/mpi/requests.h"

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
  auto news = std::make_unique<RankNotice>();
  news->rank = rank;
  if (fault) {
    const std::string text = text_of(fault);
    news->failed = 1;
    news->kind = kind_of(fault);
    std::memcpy(news->text, text.data(), std::min(text.size(), sizeof(news->text) - 1));
  }
  roll_.ended(rank, fault);
  std::lock_guard lock(sending_);
  for (int p = 0; p < process_.size(); ++p) {
    if (p == process_.index()) continue;
    const int code = MPI_Isend(news.get(), sizeof(RankNotice), MPI_BYTE, p, kNewsTag, comm_,
                               outbox_->requests.add(p));
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
                " did not arrive within ", std::chrono::duration<double>(timeout_).count(), " s");
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
  check_mpi(MPI_Irecv(inbox_.get(), sizeof(RankNotice), MPI_BYTE, MPI_ANY_SOURCE, kNewsTag, comm_,
                      &incoming_),
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

namespace {

using std::chrono::milliseconds;

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

}  // namespace

Process& Process::instance(milliseconds timeout) {
  static Process& process = *new Process(timeout);
  return process;
}

Process::Process(milliseconds timeout) {
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

}  // namespace moesh::comm::mpi
