// all_gather where ep x etp are the tp ranks themselves: the routed and the shared experts use one
// gather and one reduction.

#include "moesh/nn/dispatch/ways.h"
#include "moesh/nn/residual.h"
#include "moesh/spmd/cross.h"
#include "moesh/spmd/together.h"

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
    const auto [x, scores, chosen] = gather<Sp>(in, x_ND, rows.sizes);
    const Sum y = dense(in.experts.apply_to_tokens(sparse(x), sparse(scores), experts_of(chosen)));
    return to_stream<Sp>(in.shared ? y + (*in.shared)(x) : y, rows);
  }

  // x, scores and choices of all tokens of the tp ranks.
  template <bool Sp>
  static std::tuple<Full, Full, Full> gather(const DispatchInput& in, const Stream<Sp>& x_ND,
                                             const std::vector<std::int64_t>& rows) {
    const auto& scores_NK = in.route.weights_NK;
    if constexpr (Sp) {
      return all_gather_together<tp>(rows, x_ND, scores_NK, numbers(in.route));
    } else {  // x is everywhere already
      return std::tuple_cat(std::tuple(enter<tp>(x_ND)),
                            all_gather_together<tp>(rows, scores_NK, numbers(in.route)));
    }
  }
};

}  // namespace

std::unique_ptr<const Dispatch> make_all_gather_over_tp() {
  return std::make_unique<AllGatherOverTp>();
}

}  // namespace moesh::nn
