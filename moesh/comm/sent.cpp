#include "moesh/comm/sent.h"

#include <utility>

namespace moesh::comm {

std::int64_t sent_bytes(Collective op, std::int64_t bytes, std::int64_t own, int num_ranks) {
  const std::int64_t n = num_ranks;
  switch (op) {
    case Collective::all_reduce: return 2 * bytes * (n - 1) / n;
    case Collective::all_gather: return bytes * (n - 1);
    case Collective::reduce_scatter:
    case Collective::all_to_all: return bytes - own;
    case Collective::broadcast: return bytes * (n - 1) / n;
    case Collective::send: return bytes;
    case Collective::barrier:
    case Collective::split:
    case Collective::recv: return 0;
  }
  return 0;
}

void SentBytes::called(const Operation& o) {
  bytes_[o.group.name()] += sent_bytes(o.op, o.bytes, o.own_bytes(), o.group.size());
}

std::map<std::string, std::int64_t> SentBytes::take() { return std::exchange(bytes_, {}); }

}  // namespace moesh::comm
