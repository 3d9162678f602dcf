#pragma once
// Gated DeltaNet as a layer, against its formula written out in plain LibTorch.

#include <string>

#include "moesh/comm/mesh.h"

namespace moesh::delta_net_check {

/// What is wrong on this mesh, with sequences of one document or of several: "y", or on one rank
/// also the name of a parameter whose gradient differs. Empty: nothing.
std::string complaint(const MeshShape& shape, bool has_documents);

}  // namespace moesh::delta_net_check
