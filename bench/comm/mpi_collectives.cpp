#include "mpi_collectives.h"

#include <mpi.h>

namespace moesh::bench {

bool has_mpi_collectives() { return true; }

void mpi_all_reduce(const float* x, float* y, std::int64_t numel) {
  MPI_Allreduce(x, y, static_cast<int>(numel), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

void mpi_all_gather(const float* x, float* y, std::int64_t numel) {
  MPI_Allgather(x, static_cast<int>(numel), MPI_FLOAT, y, static_cast<int>(numel), MPI_FLOAT,
                MPI_COMM_WORLD);
}

void mpi_all_to_all(const float* x, float* y, std::int64_t numel) {
  MPI_Alltoall(x, static_cast<int>(numel), MPI_FLOAT, y, static_cast<int>(numel), MPI_FLOAT,
               MPI_COMM_WORLD);
}

}  // namespace moesh::bench
