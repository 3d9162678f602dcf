#pragma once
// The dense SwiGLU: w2 (silu(w1 x) * w3 x), column and row cut over tp.

#include <string>

#include "moesh/nn/linear.h"
#include "moesh/nn/residual.h"

namespace moesh::nn {

class Mlp {
 public:
  Mlp(const std::string& name, std::int64_t dim, std::int64_t ffn, const ModuleOptions& o)
      : w1_(column(name + ".gate_proj", ffn, dim, o)),
        w3_(column(name + ".up_proj", ffn, dim, o)),
        w2_(row(name + ".down_proj", dim, ffn, o)) {}

  Sum operator()(const Full& x) const { return linear(silu(linear(x, use(w1_))) * linear(x, use(w3_)), use(w2_)); }

  template <class Fn>
  void each_param(Fn f) {
    f(w1_), f(w3_), f(w2_);
  }

 private:
  Cut w1_, w3_, w2_;
};

}  // namespace moesh::nn
