#pragma once
// Linear layers and their weights [out, in], by how tp cuts them.

#include <memory>
#include <optional>
#include <string>

#include "moesh/nn/rope.h"
#include "moesh/spmd/dtype.h"
#include "moesh/spmd/linear.h"
#include "moesh/spmd/param.h"
#include "moesh/spmd/transitions.h"

namespace moesh::nn {

using Cut = Param<Dense{Place::I, Place::I, Place::F}>;    // own features on tp
using Uncut = Param<Dense{Place::I, Place::I, Place::I}>;  // the same on every rank

/// What the parameters of a module have in common.
struct ModuleOptions {
  at::ScalarType dtype = at::kFloat;  // of the run; master weights of bfloat16 runs are float32
  at::Device device = at::kCPU;
  Init init{.kind = Init::Kind::normal, .scale = 0.02};
  std::optional<Init> bias_init = {};  // of biases; as the others if not given
  std::shared_ptr<RopeTables> rope_tables = std::make_shared<RopeTables>();

  ParamSpec spec(const std::string& name, std::vector<std::int64_t> shape,
                 std::vector<std::pair<Axes, std::int64_t>> cuts = {}) const {
    return {.name = name,
            .shape = std::move(shape),
            .cuts = std::move(cuts),
            .dtype = wide_dtype(dtype),
            .compute = dtype,
            .device = device};
  }
};

/// Column: a rank computes its own slice of the outputs.
inline Cut column(const std::string& name, std::int64_t out, std::int64_t in,
                  const ModuleOptions& o) {
  return Cut(o.spec(name + ".weight", {out, in}, {{tp, 0}}), o.init);
}
/// Row: a rank has its own slice of the inputs, and a partial sum of the outputs.
inline Cut row(const std::string& name, std::int64_t out, std::int64_t in, const ModuleOptions& o) {
  return Cut(o.spec(name + ".weight", {out, in}, {{tp, 1}}), o.init);
}
inline Uncut uncut(const std::string& name, std::int64_t out, std::int64_t in,
                   const ModuleOptions& o) {
  return Uncut(o.spec(name + ".weight", {out, in}), o.init);
}

/// x w^T + b, own outputs on tp.
class ColumnLinear {
 public:
  ColumnLinear() = default;
  ColumnLinear(const std::string& name, std::int64_t out, std::int64_t in, bool has_bias,
               const ModuleOptions& o)
      : weight_(column(name, out, in, o)) {
    if (has_bias)
      bias_.emplace(o.spec(name + ".bias", {out}, {{tp, 0}}), o.bias_init.value_or(o.init));
  }

  Tensor<Dense{Place::T, Place::T, Place::F}> operator()(
      const Tensor<Dense{Place::T, Place::T, Place::R}>& x) const {
    return bias_ ? linear(x, use(weight_), use(*bias_)) : linear(x, use(weight_));
  }
  template <class Fn>
  void each_param(Fn f) {
    f(weight_);
    if (bias_) f(*bias_);
  }

 private:
  Cut weight_;
  std::optional<Cut> bias_;
};

/// x w^T + b, own inputs on tp. The output is a partial sum: its bias counts on one rank.
class RowLinear {
 public:
  RowLinear() = default;
  RowLinear(const std::string& name, std::int64_t out, std::int64_t in, bool has_bias,
            const ModuleOptions& o)
      : weight_(row(name, out, in, o)) {
    if (has_bias) bias_.emplace(o.spec(name + ".bias", {out}), o.bias_init.value_or(o.init));
  }

  Tensor<Dense{Place::T, Place::T, Place::P}> operator()(
      const Tensor<Dense{Place::T, Place::T, Place::F}>& x) const {
    return bias_ ? linear(x, use(weight_), once<tp>(use(*bias_))) : linear(x, use(weight_));
  }
  template <class Fn>
  void each_param(Fn f) {
    f(weight_);
    if (bias_) f(*bias_);
  }

 private:
  Cut weight_;
  std::optional<Uncut> bias_;
};

}  // namespace moesh::nn
