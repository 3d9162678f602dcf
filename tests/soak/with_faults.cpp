// Linked with apps/moesh.cpp: the command on a file system with the faults of MOESH_FAULTS, see
// FaultyFileSystem::parse.
#include <cstdlib>

#include "tests/faulty_file_system.h"

namespace {

const moesh::WithFaults faults(std::getenv("MOESH_FAULTS") ? std::getenv("MOESH_FAULTS") : "");

}  // namespace
