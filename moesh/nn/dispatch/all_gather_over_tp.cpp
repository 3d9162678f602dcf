// all_gather where ep x etp are the tp ranks themselves: the routed and the shared experts use one
// gather and one reduction.

#include "moesh/nn/dispatch/ways.h"
#include "moesh/nn/residual.h"
#include "moesh/spmd/cross.h"

namespace moesh::nn {
namespace {

class AllGatherOverTp final : public Dispatch {
 public:
  Stream<true> operator()(const DispatchInput& in, const Stream<true>& x_ND) const override {
    return run<true>(in, x_ND);
  }
  Stream<false> operator()(const DispatchInput& in, const Stream<false>& x_ND) const override {
    return run<false>(in, x_ND);
  }

 private:
  template <bool Sp>
  static Stream<Sp> run(const DispatchInput& in, const Stream<Sp>& x_ND) {
    const Along rows = rows_over_tp(in.tokens);
    const Full x = to_full<Sp>(x_ND, rows);
    const auto scores = all_gather<tp>(in.route.weights_NK, rows);
    const auto chosen = all_gather<tp>(in.route.experts_NK, rows);
    const Sum y = dense(in.experts.apply_to_tokens(sparse(x), sparse(scores), local(chosen)));
    return to_stream<Sp>(in.shared ? y + (*in.shared)(x) : y, rows);
  }
};

}  // namespace

std::unique_ptr<const Dispatch> make_all_gather_over_tp() {
  return std::make_unique<AllGatherOverTp>();
}

}  // namespace moesh::nn
