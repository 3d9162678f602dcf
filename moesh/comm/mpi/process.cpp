#include "moesh/comm/mpi/process.h"

#include <condition_variable>
#include <cstdlib>
#include <thread>

#include "moesh/base/exit_code.h"
#include "moesh/base/log.h"
#include "moesh/comm/mpi/requests.h"

namespace moesh::comm::mpi {
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
