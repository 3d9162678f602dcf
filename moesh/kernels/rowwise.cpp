#include "moesh/kernels/rowwise.h"

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace {

void check_norm(const at::Tensor& x, const at::Tensor& weight_D) {
  MOESH_CHECK(x.defined() && x.dim() >= 1 && is_kernel_dtype(x.scalar_type()), ErrorKind::data,
              "x is ", describe(x), "; a norm takes float64, float32 or bfloat16 [.., features]");
  if (!weight_D.defined()) return;
  check_tensor("weight_D", weight_D, wide(x), 1);
  check_same_device("weight_D", weight_D, "x", x);
  MOESH_CHECK(weight_D.size(0) == x.size(-1), ErrorKind::data, "weight_D is ", describe(weight_D),
              "; a norm of ", x.size(-1), " features has one weight for each");
}

void check_rotation(const Rotation& r, const at::Tensor& x) {
  MOESH_CHECK(x.defined() && x.dim() == 4 && is_kernel_dtype(x.scalar_type()), ErrorKind::data,
              "x is ", describe(x),
              "; heads are float64, float32 or bfloat16 [batch, positions, heads, features]");
  check_tensor("cos_Pf", r.cos_Pf, wide(x), 2);
  check_tensor("sin_Pf", r.sin_Pf, wide(x), 2);
  check_same_device("cos_Pf", r.cos_Pf, "x", x);
  if (r.positions_BL.defined()) {
    check_tensor("positions_BL", r.positions_BL, at::kLong, 2);
    check_same_device("positions_BL", r.positions_BL, "x", x);
    MOESH_CHECK(r.positions_BL.sizes() == x.sizes().slice(0, 2) && r.positions_BL.is_contiguous(),
                ErrorKind::data, "positions are ", describe(r.positions_BL), " for heads ",
                describe(x), "; they are contiguous, one for each token");
  }
  MOESH_CHECK(r.cos_Pf.sizes() == r.sin_Pf.sizes() &&
                  (r.positions_BL.defined() || r.cos_Pf.size(0) == x.size(1)) &&
                  2 * r.cos_Pf.size(1) <= x.size(3) && r.cos_Pf.is_contiguous() &&
                  r.sin_Pf.is_contiguous(),
              ErrorKind::data, "cos is ", describe(r.cos_Pf), " and sin ", describe(r.sin_Pf),
              " for heads ", describe(x),
              "; both have a line for each position and at most a number for each two features");
}

void check_like(const char* name, const at::Tensor& t, const at::Tensor& gate) {
  MOESH_CHECK(gate.defined() && is_kernel_dtype(gate.scalar_type()) && t.defined() &&
                  t.sizes() == gate.sizes() && t.scalar_type() == gate.scalar_type() &&
                  t.device() == gate.device(),
              ErrorKind::data, name, " is ", describe(t), " beside a gate ", describe(gate),
              "; pass both as float64, float32 or bfloat16 of one shape");
}

void check_sinks(const at::Tensor& y, const at::Tensor& lse, const at::Tensor& sinks_h) {
  const auto fits = [&] {
    auto sizes = y.sizes().vec();  // [.., L, h]
    sizes.pop_back();
    std::swap(sizes[sizes.size() - 2], sizes[sizes.size() - 1]);
    return lse.sizes() == at::IntArrayRef(sizes) && sinks_h.dim() == 1 &&
           sinks_h.size(0) == y.size(-2);
  };
  MOESH_CHECK(
      y.defined() && y.dim() >= 3 && is_kernel_dtype(y.scalar_type()) && lse.defined() &&
          sinks_h.defined() && lse.scalar_type() == wide(y) && sinks_h.scalar_type() == wide(y) &&
          fits(),
      ErrorKind::data, "sinks are ", describe(sinks_h), " and lse ", describe(lse),
      " beside attention's result ", describe(y),
      "; pass y [.., L, h, d], lse [.., h, L] and sinks [h], the last two as float32, or all as "
      "float64");
}

}  // namespace

NormOutput norm_forward(const at::Tensor& x, const at::Tensor& weight_D, double eps,
                        const std::optional<Rotation>& turn) {
  check_norm(x, weight_D);
  if (turn) check_rotation(*turn, x);
  return call(x.device(), &KernelTable::norm_forward, AsItLies{x}, weight_D, eps, turn);
}

NormGradients norm_backward(const at::Tensor& x, const at::Tensor& weight_D, const at::Tensor& r,
                            const at::Tensor& dy, const std::optional<Rotation>& turn,
                            const at::Tensor& beside) {
  check_norm(x, weight_D);
  if (turn) check_rotation(*turn, x);
  MOESH_CHECK(r.defined() && r.sizes() == x.sizes().slice(0, static_cast<size_t>(x.dim() - 1)),
              ErrorKind::data, "r is ", describe(r), " for x ", describe(x),
              "; pass what norm_forward gave");
  for (const auto* d : {&dy, &beside})
    MOESH_CHECK((d == &beside && !d->defined()) ||
                    (d->defined() && d->sizes() == x.sizes() &&
                     d->scalar_type() == x.scalar_type() && d->device() == x.device()),
                ErrorKind::data, d == &dy ? "dy" : "beside", " is ", describe(*d), "; x and y are ",
                describe(x));
  return call(x.device(), &KernelTable::norm_backward, AsItLies{x}, weight_D, r, AsItLies{dy}, turn,
              AsItLies{beside});
}

at::Tensor rotate_forward(const Rotation& rotation, const at::Tensor& x_BLhd, Argument x) {
  check_rotation(rotation, x_BLhd);
  return call(x_BLhd.device(), &KernelTable::rotate_forward, rotation, AsItLies{x_BLhd}, x);
}

at::Tensor rotate_backward(const Rotation& rotation, const at::Tensor& dy_BLhd, Argument dy) {
  check_rotation(rotation, dy_BLhd);
  return call(dy_BLhd.device(), &KernelTable::rotate_backward, rotation, AsItLies{dy_BLhd}, dy);
}

LatentHeads latent_heads_forward(const at::Tensor& kv, const at::Tensor& key,
                                 std::int64_t num_own) {
  MOESH_CHECK(kv.defined() && key.defined() && kv.dim() == 4 && key.dim() == 3 &&
                  is_kernel_dtype(kv.scalar_type()) && kv.scalar_type() == key.scalar_type() &&
                  kv.sizes().slice(0, 2) == key.sizes().slice(0, 2) && num_own >= 0 &&
                  num_own <= kv.size(3),
              ErrorKind::data, "kv is ", describe(kv), " and key ", describe(key), ", of which ",
              num_own, " features are keys; pass [batch, positions, heads, features] and [batch, ",
              "positions, features] of one dtype");
  check_same_device("key", key, "kv", kv);
  return call(kv.device(), &KernelTable::latent_heads_forward, AsItLies{kv}, AsItLies{key},
              num_own);
}

LatentGradients latent_heads_backward(const at::Tensor& dk, const at::Tensor& dv,
                                      std::int64_t num_own) {
  MOESH_CHECK(dk.defined() && dv.defined() && dk.dim() == 4 && dv.dim() == 4 &&
                  is_kernel_dtype(dk.scalar_type()) && dk.scalar_type() == dv.scalar_type() &&
                  dk.sizes().slice(0, 3) == dv.sizes().slice(0, 3) && num_own >= 0 &&
                  num_own <= dk.size(3),
              ErrorKind::data, "the gradients are ", describe(dk), " of keys and ", describe(dv),
              " of values, of which ", num_own,
              " features are the heads' own; both have the same tokens and heads");
  return call(dk.device(), &KernelTable::latent_heads_backward, AsItLies{dk}, AsItLies{dv},
              num_own);
}

at::Tensor swiglu_forward(const at::Tensor& gate, const at::Tensor& up) {
  check_like("up", up, gate);
  return call(gate.device(), &KernelTable::swiglu_forward, gate, up);
}

SwigluGradients swiglu_backward(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& dh,
                                bool wants_h) {
  check_like("up", up, gate);
  check_like("dh", dh, gate);
  return call(gate.device(), &KernelTable::swiglu_backward, gate, up, dh, wants_h);
}

at::Tensor add_sinks_(const at::Tensor& y, const at::Tensor& lse, const at::Tensor& sinks_h) {
  check_sinks(y, lse, sinks_h);
  return call(y.device(), &KernelTable::add_sinks_, AsItLies{y}, lse, sinks_h);
}

at::Tensor sink_gradient(const at::Tensor& y, const at::Tensor& lse, const at::Tensor& sinks_h,
                         const at::Tensor& dy) {
  check_sinks(y, lse, sinks_h);
  MOESH_CHECK(dy.defined() && dy.sizes() == y.sizes() && dy.scalar_type() == y.scalar_type(),
              ErrorKind::data, "the gradient of attention's result ", describe(y), " is ",
              describe(dy), "; pass one of its shape and dtype");
  return call(y.device(), &KernelTable::sink_gradient, y, lse, sinks_h, dy);
}

namespace {

at::ScalarType check_logits(const at::Tensor& logits_NV, const at::Tensor& label_N) {
  MOESH_CHECK(logits_NV.defined() && logits_NV.dim() == 2 && logits_NV.is_contiguous() &&
                  is_kernel_dtype(logits_NV.scalar_type()),
              ErrorKind::data, "logits_NV is ", describe(logits_NV),
              "; pass contiguous float64, float32 or bfloat16 [tokens, words]");
  check_tensor("label_N", label_N, at::kLong, 1);
  check_same_device("label_N", label_N, "logits_NV", logits_NV);
  MOESH_CHECK(label_N.size(0) == logits_NV.size(0), ErrorKind::data, "label_N is ",
              describe(label_N), " for logits ", describe(logits_NV),
              "; there is a label for each token");
  return wide(logits_NV);
}

}  // namespace

LogitSums logit_sums(const at::Tensor& logits_NV, const at::Tensor& label_N) {
  check_logits(logits_NV, label_N);
  return call(logits_NV.device(), &KernelTable::logit_sums, logits_NV, label_N);
}

at::Tensor logit_gradient_(const at::Tensor& logits_NV, const at::Tensor& label_N,
                           const at::Tensor& total_N, const at::Tensor& weight_N) {
  const auto dtype = check_logits(logits_NV, label_N);
  check_tensor("total_N", total_N, dtype, 1);
  check_tensor("weight_N", weight_N, dtype, 1);
  MOESH_CHECK(total_N.size(0) == label_N.size(0) && weight_N.size(0) == label_N.size(0),
              ErrorKind::data, "total_N is ", describe(total_N), " and weight_N ",
              describe(weight_N), " for ", label_N.size(0), " tokens");
  return call(logits_NV.device(), &KernelTable::logit_gradient_, logits_NV, label_N, total_N,
              weight_N);
}

}  // namespace moesh::kernels
