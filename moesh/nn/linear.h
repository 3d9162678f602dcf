#pragma once
// Linear layers and their weights [out, in], by how tp cuts them, with what LoRA adds to them.

#include <ATen/TensorOperators.h>

#include <memory>
#include <optional>
#include <string>

#include "moesh/fsdp/param.h"
#include "moesh/fsdp/recompute.h"
#include "moesh/kernels/float8.h"
#include "moesh/nn/lora.h"
#include "moesh/nn/rope.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/tensor.h"
#include "moesh/spmd/transitions.h"

namespace moesh::nn {

using Cut = Param<Dense{Place::I, Place::I, Place::F}>;    // own features on tp
using Uncut = Param<Dense{Place::I, Place::I, Place::I}>;  // the same on every rank

using Cuts = std::vector<std::pair<Axes, std::int64_t>>;

/// Options that all parameters of a module have in common.
struct ModuleOptions {
  at::ScalarType dtype = at::kFloat;  // of the run; master weights of bfloat16 runs are float32
  at::Device device = at::kCPU;
  Init init{.kind = Init::Distribution::normal, .scale = 0.02};
  std::optional<Init> bias_init = {};  // of biases; as the others if not given
  std::shared_ptr<RopeTables> rope_tables = std::make_shared<RopeTables>();
  LoraOf lora = no_lora;
  kernels::Float8 float8 = {};

  /// For a layer whose gradients are parts of a sum, which may not be rounded, or that needs more
  /// precision.
  ModuleOptions without_float8() const {
    ModuleOptions o = *this;
    o.float8 = {};
    return o;
  }
  ParamSpec spec(const std::string& name, std::vector<std::int64_t> shape, Cuts cuts = {}) const {
    return {.name = name,
            .shape = std::move(shape),
            .cuts = std::move(cuts),
            .dtype = wide_dtype(dtype),
            .compute = dtype,
            .device = device};
  }
  /// One that is computed with in float32 in bfloat16 runs, and is not a matrix to optimizers.
  ParamSpec wide_spec(const std::string& name, std::vector<std::int64_t> shape,
                      Cuts cuts = {}) const {
    ParamSpec wide = spec(name, std::move(shape), std::move(cuts));
    wide.compute.reset();
    wide.is_matrix = false;
    return wide;
  }
};

/// The products with a weight that is rounded to float8 in tiles.
OwnProducts float8_products(const Stored& w);

/// scale B (A x), from the layouts of A and B.
template <auto A, auto B>
class LowRank {
 public:
  LowRank(const std::string& name, std::int64_t out, std::int64_t in, const Cuts& cuts_of_a,
          const Cuts& cuts_of_b, const LoraConfig& lora, const ModuleOptions& o)
      : scale_(lora.scale),
        a_(o.spec(name + kLoraA, {lora.rank, in}, cuts_of_a), init_of_a(in, o.init)),
        b_(o.spec(name + kLoraB, {out, lora.rank}, cuts_of_b), init_of_b(lora, o.init)) {
    if (lora.dropout > 0) dropout_.emplace(lora.dropout, o.init.seed, name);
  }

  /// `numbers` are those of the tokens of x; undefined: nothing is dropped.
  template <auto X>
  auto operator()(const Tensor<X>& x, const at::Tensor& numbers) const {
    const auto a = use(a_);  // in this order everywhere: each may gather
    const auto b = use(b_);
    return linear(scale(linear(dropped(x, numbers), a), scale_), b);
  }
  /// w + scale B A.
  template <auto W>
  auto added_to(const Tensor<W>& w) const {
    const auto a = use(a_);
    return plus_product(w, use(b_), a, scale_);
  }
  template <class Fn>
  void each_param(Fn f) {
    f(a_), f(b_);
  }

 private:
  // Ranks with the same features of the same tokens drop the same ones. Backward computes again
  // what was dropped, so nothing is kept for it.
  template <auto X>
  Tensor<X> dropped(const Tensor<X>& x, const at::Tensor& numbers) const {
    if (!dropout_ || !numbers.defined()) return x;
    const auto times = [dropout = *dropout_, numbers,
                        first = a_.stored().compute.start[1]](const at::Tensor& t) {
      return t * dropout.factors(numbers, first, t.size(-1), t.scalar_type());
    };
    return map_linear(times, times, x);
  }

  double scale_;
  Param<A> a_;
  Param<B> b_;
  std::optional<Dropout> dropout_;
};

/// A weight [out, in], the bias that it may have, and what LoRA may add to it, which is never
/// multiplied out: y = w x + b + scale B (A x). `numbers` are those of the tokens of x, for dropout
/// (Tokens::numbers).
template <auto W, auto A, auto B>
class Weight {
 public:
  Weight() = default;
  Weight(const std::string& name, std::int64_t out, std::int64_t in, const Cuts& cuts,
         const Cuts& cuts_of_a, const Cuts& cuts_of_b, const ModuleOptions& o, bool has_bias)
      : weight_(o.spec(name + ".weight", {out, in}, cuts), o.init) {
    weight_.stored().spec.float8_tile = o.float8.dense;
    if (const auto lora = o.lora(name))
      lora_.emplace(name, out, in, cuts_of_a, cuts_of_b, *lora, o);
    if (has_bias)
      bias_.emplace(o.spec(name + ".bias", {out}, cuts_of_b), o.bias_init.value_or(o.init));
  }

  template <auto X>
  auto operator()(const Tensor<X>& x, const at::Tensor& numbers = {}) const {
    const auto both = for_both(x);
    const auto w = use(weight_);
    return plus_lora(bias_ ? linear(both, w, own_bias(), products()) : linear(both, w, products()),
                     both, numbers);
  }
  /// The same, for weights without a bias; a recompute that keeps values keeps the product.
  template <auto X>
  auto kept(const Tensor<X>& x, const at::Tensor& numbers) const {
    MOESH_CHECK(!bias_, "a kept product with ", weight_.stored().spec.name, ", which has a bias");
    const auto both = for_both(x);
    return plus_lora(kept_linear(both, use(weight_), products()), both, numbers);
  }
  /// y = w x, plus the LoRA term.
  template <auto Y, auto X>
  Tensor<Y> plus_lora(const Tensor<Y>& y, const Tensor<X>& x, const at::Tensor& numbers) const {
    return lora_ ? y + (*lora_)(x, numbers) : y;
  }
  /// The whole matrix, for uses that are not a product with x. A and B get no gradient from it.
  auto whole() const {
    const auto w = use(weight_);
    return lora_ ? lora_->added_to(w) : w;
  }
  const Param<W>& weight() const { return weight_; }
  /// The products of the weight, not of what LoRA adds.
  OwnProducts products() const {
    const Stored& w = weight_.stored();
    return w.spec.float8_tile == 0 ? OwnProducts() : float8_products(w);
  }
  Stored& stored() { return weight_.stored(); }
  bool has_lora() const { return lora_.has_value(); }
  template <class Fn>
  void each_param(Fn f) {
    f(weight_);
    if (lora_) lora_->each_param(f);
    if (bias_) f(*bias_);
  }

 private:
  /// Backward adds the gradient of x by LoRA to that by the weight, without a pass of its own.
  template <auto X>
  Tensor<X> for_both(const Tensor<X>& x) const {
    return lora_ ? for_several(x) : x;
  }
  /// Where ranks have slices of the inputs, outputs are partial sums: the bias counts on one rank.
  auto own_bias() const {
    if constexpr (A == Cut::layout)
      return once<tp>(use(*bias_));
    else
      return use(*bias_);
  }

  Param<W> weight_;
  std::optional<Param<B>> bias_;  // cut as the outputs are
  std::optional<LowRank<A, B>> lora_;
};

/// Column: a rank computes its own slice of the outputs, and of what B adds to them; A is whole.
using ColumnWeight = Weight<Cut::layout, Uncut::layout, Cut::layout>;
/// Row: a rank has its own slice of the inputs, and so of those of A: w x and A x are partial sums,
/// and so is B (A x), of a whole B.
using RowWeight = Weight<Cut::layout, Cut::layout, Uncut::layout>;
using UncutWeight = Weight<Uncut::layout, Uncut::layout, Uncut::layout>;

inline ColumnWeight column(const std::string& name, std::int64_t out, std::int64_t in,
                           const ModuleOptions& o, bool has_bias = false) {
  return {name, out, in, {{tp, 0}}, {}, {{tp, 0}}, o, has_bias};
}
inline RowWeight row(const std::string& name, std::int64_t out, std::int64_t in,
                     const ModuleOptions& o, bool has_bias = false) {
  return {name, out, in, {{tp, 1}}, {{tp, 1}}, {}, o, has_bias};
}
inline UncutWeight uncut(const std::string& name, std::int64_t out, std::int64_t in,
                         const ModuleOptions& o) {
  // Each tp rank has a part of its gradient.
  return {name, out, in, {}, {}, {}, o.without_float8(), false};
}

}  // namespace moesh::nn
