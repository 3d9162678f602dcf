#pragma once
// A group whose other ranks are not there: one rank of a world of any size runs by itself, to see
// what it would hold and send.

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "moesh/comm/group.h"

namespace moesh::comm {

/// What one rank sends, by group and collective, on the ways that move the least: rings, and rows
/// straight to their rank. It receives as much, where shards are even.
struct Traffic {
  std::int64_t num_calls = 0, num_bytes = 0;
};
using Ledger = std::map<std::pair<std::string, Collective>, Traffic>;

/// Results have their true shapes and no meaning: zeros, and where values on the host are gathered,
/// what this rank itself has, as if all had the same. `ledger` must outlive the group.
std::shared_ptr<Group> fake_group(const std::string& name, int rank,
                                  const std::vector<int>& members, Ledger& ledger);

}  // namespace moesh::comm
