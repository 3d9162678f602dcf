#pragma once
// Calls of MPI as they are made here: errors are thrown, waits are looks, and what MPI may still
// write is never freed.

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "moesh/base/error.h"

namespace moesh::comm::mpi {

inline void check_mpi(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(ErrorKind::comm,
              detail::concat(what, " failed: ", std::string(text, static_cast<size_t>(length))));
}

// Between two looks: the core goes to other threads, and after some of them the thread sleeps,
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

}  // namespace moesh::comm::mpi
