#pragma once
#include "moesh/comm/mesh.h"

namespace moesh {

/// The mesh of a world of one, as long as the scope lives: for names and whole shapes, which do not
/// depend on a mesh.
class OneRankScope {
 private:
  std::shared_ptr<comm::Group> world_ = comm::solo_group();
  Mesh mesh_{*world_, {}};
  MeshScope scope_{mesh_};
};

}  // namespace moesh
