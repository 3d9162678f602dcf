#include "moesh/nn/attention.h"

#include <ATen/ATen.h>

#include "moesh/base/error.h"
#include "moesh/nn/fused_attention.h"
#include "moesh/spmd/all_gather.h"

namespace moesh::nn {

AllHeads all_positions(const Heads& x, const Tokens& tokens) { return all_gather<cp>(x, tokens.over_cp()); }

Heads attend(const Heads& q, const AllHeads& k, const AllHeads& v, const Tokens& tokens, const AttentionOptions& options) {
  return declare<Heads::layout>(
      [&](const at::Tensor& q_BLhd, const at::Tensor& k_BSgd, const at::Tensor& v_BSgd) {
        if (kernels::has_attention(q_BLhd.device()))
          return raw::fused_attention({.scale = options.scale, .start = tokens.block_start()}, {q_BLhd, k_BSgd, v_BSgd, {}});
        const auto heads = [](const at::Tensor& x) { return x.transpose(1, 2); };
        at::Tensor keys = heads(k_BSgd), values = heads(v_BSgd);
        const at::Tensor queries = heads(q_BLhd);
        const auto length = queries.size(2), all = keys.size(2), groups = keys.size(1);
        MOESH_CHECK(groups == 0 || queries.size(1) % groups == 0, ErrorKind::config, "attention: this rank has ", queries.size(1),
                    " query heads and ", groups, " key heads; choose a tp that divides both numbers of heads");
        if (groups > 0 && groups != queries.size(1)) {
          keys = keys.repeat_interleave(queries.size(1) / groups, 1);
          values = values.repeat_interleave(queries.size(1) / groups, 1);
        }
        if (queries.numel() == 0) {  // a rank without tokens or heads: an empty result that still hangs on its inputs
          return heads(queries.matmul(keys.transpose(-1, -2)).matmul(values));
        }
        const auto width = values.size(-1), key_width = keys.size(-1);
        // The fused kernels want heads of one width.
        if (width < key_width) values = at::constant_pad_nd(values, {0, key_width - width});
        at::Tensor out;
        if (length == all) {
          out = at::scaled_dot_product_attention(queries, keys, values, {}, 0.0, /*is_causal=*/true, options.scale);
        } else {
          const auto index = at::TensorOptions(queries.device()).dtype(at::kLong);
          const at::Tensor mine = at::arange(tokens.block_start(), tokens.block_start() + length, index).unsqueeze(1);
          const at::Tensor visible = mine >= at::arange(all, index);
          out = at::scaled_dot_product_attention(queries, keys, values, visible, 0.0, /*is_causal=*/false, options.scale);
        }
        return heads(out.narrow(-1, 0, width));
      },
      q, k, v);
}

}  // namespace moesh::nn
