#pragma once
// Messages between two ranks of an MPI group: a header, and then what it describes.

#include "moesh/comm/mpi/world.h"

namespace moesh::comm::mpi {

/// x to rank `peer` of the group, as `call` says.
std::unique_ptr<Work> send_message(std::shared_ptr<MpiWorld> world,
                                   std::shared_ptr<const GroupInfo> group, int peer,
                                   const Call& call, const at::Tensor& x);

/// The next message of rank `peer`, which must be what `call` says, into `out`.
std::unique_ptr<Work> receive_message(std::shared_ptr<MpiWorld> world,
                                      std::shared_ptr<const GroupInfo> group, int peer,
                                      const Call& call, const at::Tensor& out);

}  // namespace moesh::comm::mpi
