#include "moesh/base/error.h"
#include "moesh/comm/launch.h"

namespace moesh::comm {

void launch_mpi(int, const std::function<void(Group&)>&, const LaunchOptions&) {
  throw Error(
      ErrorKind::config,
      "this program was started by an MPI launcher, and moesh was built without MPI: install Open MPI and build again, or "
      "start it without mpirun (its ranks are then threads)");
}

}  // namespace moesh::comm
