#include "moesh/kernels/attention.h"

#include "moesh/base/error.h"
#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace {

void check(const AttentionConfig& config, const AttentionInput& in) {
  const auto &q = in.q_BLhd, &k = in.k_BSgd, &v = in.v_BSgv;
  MOESH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, ErrorKind::internal, "attention: q ",
              q.sizes(), ", k ", k.sizes(), ", v ", v.sizes(),
              "; each is [batch, positions, heads, width]");
  MOESH_CHECK(q.size(0) == k.size(0) && k.size(0) == v.size(0) && k.size(1) == v.size(1) &&
                  k.size(2) == v.size(2) && q.size(3) == k.size(3),
              ErrorKind::internal, "attention: q ", q.sizes(), ", k ", k.sizes(), " and v ",
              v.sizes(), " do not fit");
  MOESH_CHECK(k.size(2) > 0 ? q.size(2) % k.size(2) == 0 : q.size(2) == 0, ErrorKind::config,
              "attention: ", q.size(2), " query heads and ", k.size(2),
              " key heads; the first must be a multiple of the second");
  MOESH_CHECK(q.scalar_type() == k.scalar_type() && k.scalar_type() == v.scalar_type() &&
                  takes_attention(config, in),
              ErrorKind::internal, "attention: q, k and v are ", q.scalar_type(), ", ",
              k.scalar_type(), ", ", v.scalar_type(), " on ", q.device(),
              "; they must be of one dtype, on a device that has a kernel for them");
  MOESH_CHECK(config.start >= 0 && config.start + q.size(1) <= k.size(1), ErrorKind::internal,
              "attention: queries at ", config.start, " to ", config.start + q.size(1), " and ",
              k.size(1), " keys; every query has its own key");
  MOESH_CHECK(config.scale > 0 && config.window >= 0 && config.chunk >= 0, ErrorKind::config,
              "attention: scale ", config.scale, ", window ", config.window, ", chunk ",
              config.chunk, "; a scale is positive, the others are 0 or more");
  if (in.starts_BL.defined())
    MOESH_CHECK(in.starts_BL.sizes() == q.sizes().slice(0, 2) && in.starts_BL.is_contiguous() &&
                    in.starts_BL.scalar_type() == at::kLong,
                ErrorKind::internal, "attention: starts of documents ", in.starts_BL.sizes(),
                " of ", in.starts_BL.scalar_type(), " for queries ", q.sizes(),
                "; they are contiguous Long, one for each query of a sequence");
  if (!in.sinks_h.defined()) return;
  MOESH_CHECK(in.sinks_h.numel() == q.size(2) && in.sinks_h.is_contiguous() &&
                  in.sinks_h.scalar_type() == wide(q),
              ErrorKind::internal, "attention: sinks ", in.sinks_h.sizes(), " of ",
              in.sinks_h.scalar_type(), " for ", q.size(2),
              " heads; they are contiguous, one for each head, of type ", wide(q));
}

}  // namespace

bool takes_attention(const AttentionConfig& config, const AttentionInput& input) {
  const KernelTable& table = kernels_for(input.q_BLhd.device());
  return table.attention_forward &&
         (!table.takes_attention || table.takes_attention(config, input));
}

AttentionOutput attention_forward(const AttentionConfig& config, const AttentionInput& input) {
  check(config, input);
  return kernels_for(input.q_BLhd.device()).attention_forward(config, input);
}

AttentionGradients attention_backward(const AttentionConfig& config, const AttentionInput& input,
                                      const AttentionOutput& output, const at::Tensor& dy_BLhv) {
  check(config, input);
  MOESH_CHECK(dy_BLhv.dim() == 4 && dy_BLhv.scalar_type() == input.q_BLhd.scalar_type() &&
                  dy_BLhv.size(3) == input.v_BSgv.size(3) &&
                  dy_BLhv.sizes().slice(0, 3) == input.q_BLhd.sizes().slice(0, 3) &&
                  output.lse_BhL.is_contiguous() && output.y_BLhv.sizes() == dy_BLhv.sizes(),
              ErrorKind::internal, "attention: dy is ", dy_BLhv.sizes(), " of ",
              dy_BLhv.scalar_type(), ", for queries ", input.q_BLhd.sizes(), " of ",
              input.q_BLhd.scalar_type());
  return kernels_for(input.q_BLhd.device()).attention_backward(config, input, output, dy_BLhv);
}

namespace {

void check_starts(const at::Tensor& starts_BL, const at::Tensor& x) {
  if (!starts_BL.defined()) return;
  check_tensor("starts_BL", starts_BL, at::kLong, 2);
  MOESH_CHECK(starts_BL.sizes() == x.sizes().slice(0, 2) && starts_BL.is_contiguous(),
              ErrorKind::internal, "starts of documents are ", describe(starts_BL), " for tokens ",
              describe(x), "; there is one for each token, and they are contiguous");
}

void check(const DeltaRuleInput& in, std::int64_t chunk) {
  const auto& qkv = in.qkv_BLgc;
  MOESH_CHECK(
      qkv.dim() == 4 && is_kernel_dtype(qkv.scalar_type()) && qkv.size(1) >= 1 &&
          in.decay_BLh.dim() == 3 && in.key_dim >= 1 && qkv.size(2) >= 1 &&
          in.decay_BLh.size(2) % qkv.size(2) == 0 && in.value_dim() >= 1 &&
          qkv.size(2) * (qkv.size(3) - 2 * in.key_dim) == in.decay_BLh.size(2) * in.value_dim(),
      ErrorKind::internal, "delta rule: q, k and v are ", describe(qkv), ", with keys of ",
      in.key_dim, ", for decays ", describe(in.decay_BLh),
      "; they are [batch, tokens, key heads, 2 keys and the values of its value heads]");
  for (const at::Tensor* t : {&in.decay_BLh, &in.beta_BLh}) {
    check_tensor("decay or beta", *t, wide(qkv), 3);
    MOESH_CHECK(
        t->sizes() == in.decay_BLh.sizes() && t->sizes().slice(0, 2) == qkv.sizes().slice(0, 2),
        ErrorKind::internal, "delta rule: decay or beta is ", describe(*t), " for ", describe(qkv));
  }
  MOESH_CHECK(!in.state_Bhdv.defined() || in.state_Bhdv.sizes() == in.state_sizes(),
              ErrorKind::internal, "delta rule: the state is ", describe(in.state_Bhdv), " for ",
              describe(qkv), " with keys of ", in.key_dim);
  MOESH_CHECK(chunk >= 1, ErrorKind::internal, "delta rule: chunks of ", chunk,
              " tokens; they have 1 or more");
  check_starts(in.starts_BL, qkv);
}

void check_convolution(const at::Tensor& x, const at::Tensor& w, const at::Tensor& starts_BL) {
  MOESH_CHECK(x.dim() == 4 && is_kernel_dtype(x.scalar_type()), ErrorKind::internal, "x is ",
              describe(x), "; a convolution takes [batch, tokens, heads, channels]");
  check_tensor("w", w, wide(x), 3);
  MOESH_CHECK(w.sizes().slice(0, 2) == x.sizes().slice(2, 2) && w.size(2) >= 1, ErrorKind::internal,
              "w is ", describe(w), " for x ", describe(x),
              "; a convolution has its taps for each channel of each head");
  check_starts(starts_BL, x);
}

}  // namespace

std::int64_t DeltaRuleInput::value_dim() const {
  const std::int64_t group = decay_BLh.size(2) / qkv_BLgc.size(2);
  return (qkv_BLgc.size(3) - 2 * key_dim) / group;
}
std::array<std::int64_t, 4> DeltaRuleInput::y_sizes() const {
  return {qkv_BLgc.size(0), qkv_BLgc.size(1), decay_BLh.size(2), value_dim()};
}
std::array<std::int64_t, 4> DeltaRuleInput::state_sizes() const {
  return {qkv_BLgc.size(0), decay_BLh.size(2), key_dim, value_dim()};
}

DeltaRuleOutput delta_rule_forward(const DeltaRuleInput& input, std::int64_t chunk) {
  check(input, chunk);
  return call(input.qkv_BLgc.device(), &KernelTable::delta_rule_forward, input, chunk);
}

DeltaRuleGradients delta_rule_backward(const DeltaRuleInput& input, const at::Tensor& dy_BLhv,
                                       std::int64_t chunk) {
  check(input, chunk);
  MOESH_CHECK(dy_BLhv.sizes() == input.y_sizes(), ErrorKind::internal, "delta rule: dy is ",
              describe(dy_BLhv), " for ", describe(input.qkv_BLgc));
  return call(input.qkv_BLgc.device(), &KernelTable::delta_rule_backward, input, AsItLies{dy_BLhv},
              chunk);
}

at::Tensor convolution_forward(const at::Tensor& x, const at::Tensor& w,
                               const at::Tensor& starts_BL) {
  check_convolution(x, w, starts_BL);
  return call(x.device(), &KernelTable::convolution_forward, AsItLies{x}, w, starts_BL);
}

ConvolutionGradients convolution_backward(const at::Tensor& x, const at::Tensor& w,
                                          const at::Tensor& starts_BL, const at::Tensor& dy) {
  check_convolution(x, w, starts_BL);
  return call(x.device(), &KernelTable::convolution_backward, AsItLies{x}, w, starts_BL,
              AsItLies{dy});
}

}  // namespace moesh::kernels
