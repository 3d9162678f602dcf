#pragma once

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

namespace moesh::comm::mpi {

// MPI in this process: started by the first launch. It is ended at exit if the last world ended
// well: MPI_Finalize waits for all processes, and one that exits without it makes the launcher end
// the job.
class Process {
 public:
  static Process& instance(std::chrono::milliseconds timeout);

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
  explicit Process(std::chrono::milliseconds timeout);

  MPI_Comm comm_ = MPI_COMM_NULL;
  int index_ = 0, size_ = 1, num_on_machine_ = 1, tag_limit_ = 0;
};

}  // namespace moesh::comm::mpi
