#include "moesh/train/last_words.h"

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/roll.h"
#include "moesh/train/stop.h"

namespace moesh::train {
namespace {

using namespace std::chrono_literals;

constexpr auto kLook = 50ms;
// A wait this long after a signal is of a rank that may not come. Open MPI kills after a second.
constexpr auto kMoment = 300ms;

bool is_about_ranks(const std::exception_ptr& fault) {
  try {
    std::rethrow_exception(fault);
  } catch (const Error& e) {
    return e.kind() == ErrorKind::comm || e.kind() == ErrorKind::internal ||
           e.kind() == ErrorKind::device;
  } catch (...) {
    return true;
  }
}

}  // namespace

LastWords::LastWords(const Config& config) : config_(config) {
  if (comm::num_launched_processes() > 1) thread_ = std::thread([this] { watch(); });
}

LastWords::~LastWords() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void LastWords::add(int rank) {
  const std::lock_guard lock(mutex_);
  recorders_[rank] = comm::flight::current();
}

void LastWords::threw(int rank, const std::exception_ptr& fault) {
  {
    const std::lock_guard lock(mutex_);
    recorders_.erase(rank);
  }
  if (is_about_ranks(fault)) write(rank, *comm::flight::current(), comm::text_of(fault));
}

// A rank may still compute when the signal comes, and wait for the lost one later.
void LastWords::watch() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLook, [&] { return is_ending_; }))
    if (const int signal = stop_signal(); signal != 0) say_what_waits(signal);
}

void LastWords::say_what_waits(int signal) {
  std::erase_if(recorders_, [&](const auto& entry) {
    const auto& [rank, recorder] = entry;
    const auto waiting = comm::flight::waiting(*recorder);
    if (!waiting || waiting->time < kMoment) return false;
    set_log_rank(rank);
    write(rank, *recorder,
          detail::concat("told to stop by signal ", signal, " while rank ", rank, " has waited ",
                         waiting->time.count(), " s in ", waiting->what));
    return true;
  });
}

void LastWords::write(int rank, comm::flight::Recorder& recorder, const std::string& why) {
  if (mesh_shape(config_).num_ranks() == 1) return;
  if (config_.metrics.folder.empty()) return log_warn(why);
  const std::lock_guard lock(writing_);
  char name[40];
  std::snprintf(name, sizeof name, "flight-rank-%05d.txt", rank);
  const auto path = std::filesystem::path(config_.metrics.folder) / name;
  std::ofstream file(path);
  file << comm::flight::text(recorder) << std::flush;
  if (file.good())
    log_warn(why, "; the last collectives of this rank are in '", path.string(), "'");
  else
    log_warn(why, "; the last collectives of this rank could not be written to '", path.string(),
             "'");
}

}  // namespace moesh::train
