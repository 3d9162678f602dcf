// All tokens go to all ranks of ep x etp, one row a token; each computes the rows of its own
// experts, and one reduction sums the outputs.

#include "moesh/nn/dispatch/ways.h"
#include "moesh/spmd/cross.h"
#include "moesh/spmd/together.h"
#include "moesh/spmd/transitions.h"

namespace moesh::nn {
namespace {

class AllGather final : public RoundTrip {
  PerToken routed(const DispatchInput& in, const std::function<void()>& meanwhile) const override {
    meanwhile();
    const Along rows{.dim = 0, .sizes = in.tokens.rows(*current_mesh().group(kExpertAxes))};
    const auto [x, scores, chosen] = all_gather_together<kExpertAxes>(
        rows.sizes, sparse(in.x_ND), sparse(in.route.weights_NK), sparse(numbers(in.route)));
    const auto y = in.experts.apply_to_tokens(x, scores, experts_of(chosen));  // T,R,R -> T,P,P
    return dense(reduce_scatter<kExpertAxes>(y, rows));                        // T,T,T
  }
};

}  // namespace

std::unique_ptr<const Dispatch> make_all_gather() { return std::make_unique<AllGather>(); }

}  // namespace moesh::nn
