// ep = etp = 1: this rank has all experts, and nothing moves.

#include "moesh/nn/dispatch/ways.h"
#include "moesh/spmd/cross.h"
#include "moesh/spmd/transitions.h"

namespace moesh::nn {
namespace {

class Local final : public RoundTrip {
  PerToken routed(const DispatchInput& in, const std::function<void()>& meanwhile) const override {
    meanwhile();
    // On one rank a gather and a reduction give back what they get.
    const Along rows{.dim = 0};
    const auto x = all_gather<kExpertAxes>(sparse(in.x_ND), rows);
    const auto scores = all_gather<kExpertAxes>(sparse(in.route.weights_NK), rows);
    const auto y = in.experts.apply_to_tokens(x, scores, local(in.route.experts_NK));
    return dense(reduce_scatter<kExpertAxes>(y, rows));
  }
};

}  // namespace

std::unique_ptr<const Dispatch> make_local() { return std::make_unique<Local>(); }

}  // namespace moesh::nn
