#pragma once
// Ranks that trust no one: before each collective of a group they compare what they are about to
// do, and values that are promised to be the same on every rank (R and I) are compared by hash. So
// starting an operation waits for the other ranks.

#include "moesh/comm/group.h"

namespace moesh::comm {

/// From now on the ranks of the group compare; every rank calls it. Groups that come from this one
/// are checked, too.
void check_ranks(Group& group);

}  // namespace moesh::comm
