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

}  // namespace moesh::kernels
