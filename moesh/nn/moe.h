#pragma once
// The mixture-of-experts layer: router, dispatch, experts, combine, shared experts. One path for
// every mesh.

#include <memory>
#include <optional>
#include <string>

#include "moesh/nn/dispatch.h"
#include "moesh/nn/experts.h"
#include "moesh/nn/router.h"

namespace moesh::nn {

struct MoeConfig {
  std::string name = "moe";
  std::string router_name = "gate", shared_name = "shared_experts";  // after the name of the layer
  RouterConfig router;
  RoutedExpertsConfig experts;  // num_experts is the router's
  std::int64_t shared_ffn = 0;  // width of the shared experts together; 0: none
  std::string shared_gate =
      "";  // name of their gate, after that of the layer; empty: they have none
  Dispatcher dispatcher = Dispatcher::automatic;

  void validate() const;
};

class Moe {
 public:
  Moe(const MoeConfig& config, const ModuleOptions& o);

  template <bool Sp>
  struct Output {
    Stream<Sp> y;
    Route route;
  };
  /// x is the stream, with sequence parallelism [B, len, D], this rank's piece of the sequence;
  /// without, [B, span, D], the same on all tp ranks. No token is computed twice. `dy` in a
  /// recompute: the gradient of y.
  template <auto L>
  Output<L.tp == Place::T> operator()(const Tensor<L>& x_BLD, const Tokens& tokens,
                                      const RouteOptions& options = {},
                                      const std::optional<Tensor<L>>& dy_BLD = {});

  Router& router() { return router_; }
  /// f(param) for every parameter.
  template <class Fn>
  void each_param(Fn f) {
    f(router_.gate());
    if (router_.gate_bias()) f(*router_.gate_bias());
    experts_.each_param(f);
    if (shared_) shared_->each_param(f);
  }

 private:
  std::unique_ptr<const Dispatch> dispatch_;
  Codec codec_;
  Router router_;
  Experts experts_;
  std::optional<SharedExperts> shared_;
};

}  // namespace moesh::nn
