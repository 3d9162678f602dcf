#pragma once
// MPI's own collectives on float, on all processes of the job, for comparison.
// no_mpi_collectives.cpp stands in without MPI.

#include <cstdint>

namespace moesh::bench {

bool has_mpi_collectives();
void mpi_all_reduce(const float* x, float* y, std::int64_t numel);
/// numel from each process.
void mpi_all_gather(const float* x, float* y, std::int64_t numel);
/// numel to and from each process.
void mpi_all_to_all(const float* x, float* y, std::int64_t numel);

}  // namespace moesh::bench
