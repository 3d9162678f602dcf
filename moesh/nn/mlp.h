#pragma once
// The dense SwiGLU: down (silu(gate x) * up x), column and row cut over tp. Also the shared experts
// of a MoE layer.

#include <string>

#include "moesh/nn/linear.h"
#include "moesh/nn/residual.h"

namespace moesh::nn {

class Mlp {
 public:
  Mlp(const std::string& name, std::int64_t dim, std::int64_t ffn, const ModuleOptions& o)
      : gate_(column(name + ".gate_proj", ffn, dim, o)),
        up_(column(name + ".up_proj", ffn, dim, o)),
        down_(row(name + ".down_proj", dim, ffn, o)) {}

  Sum operator()(const Full& x) const {
    return linear(silu(linear(x, use(gate_))) * linear(x, use(up_)), use(down_));
  }

  template <class Fn>
  void each_param(Fn f) {
    f(gate_), f(up_), f(down_);
  }

 private:
  Cut gate_, up_, down_;
};

}  // namespace moesh::nn
