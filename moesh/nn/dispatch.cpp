#include "moesh/nn/dispatch.h"

#include "moesh/base/error.h"
#include "moesh/nn/dispatch/ways.h"

namespace moesh::nn {

const char* to_string(Dispatcher d) {
  switch (d) {
    case Dispatcher::automatic: return "auto";
    case Dispatcher::local: return "local";
    case Dispatcher::all_to_all: return "all_to_all";
    case Dispatcher::all_gather: return "all_gather";
  }
  return "unknown";
}

Dispatcher resolve(Dispatcher asked, const MeshShape& shape, std::int64_t top_k,
                   Exchange exchange) {
  const int ranks = shape.ep * shape.etp;
  MOESH_CHECK(asked != Dispatcher::local || ranks == 1, ErrorKind::config,
              "dispatcher 'local' needs ep = etp = 1; here ep = ", shape.ep, ", etp = ", shape.etp,
              ". Use 'auto', 'all_to_all' or 'all_gather'.");
  if (asked != Dispatcher::automatic) return asked;
  if (ranks == 1) return Dispatcher::local;
  const DispatchTimes times = dispatch_times(dispatch_rates(exchange), shape, top_k);
  return times.all_to_all < times.all_gather ? Dispatcher::all_to_all : Dispatcher::all_gather;
}

std::unique_ptr<const Dispatch> make_dispatch(Dispatcher way, const MeshShape& shape) {
  switch (way) {
    case Dispatcher::local: return make_local();
    case Dispatcher::all_to_all: return make_all_to_all();
    case Dispatcher::all_gather:
      return shape.ep * shape.etp == shape.tp ? make_all_gather_over_tp() : make_all_gather();
    case Dispatcher::automatic: break;
  }
  throw Error(ErrorKind::internal, "a dispatcher is made of what resolve() gives");
}

}  // namespace moesh::nn
