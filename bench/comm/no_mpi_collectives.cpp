#include "mpi_collectives.h"

namespace moesh::bench {

bool has_mpi_collectives() { return false; }
void mpi_all_reduce(const float*, float*, std::int64_t) {}
void mpi_all_gather(const float*, float*, std::int64_t) {}
void mpi_all_to_all(const float*, float*, std::int64_t) {}

}  // namespace moesh::bench
