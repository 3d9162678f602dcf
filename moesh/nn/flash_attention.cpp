// Sinks come after a kernel that knows nothing of them (moesh/kernels/rowwise.h). Its backward
// wants y and lse only for the probabilities p = exp(score - lse) and for D = <dy, y> in d(score) =
// p (<dy, v> - D): given y' and lse' it computes what belongs to the sink's softmax. Documents are
// the kernel's sequences of different lengths, one behind the other: T queries, U keys of the whole
// batch, and where each of N begins among them, in tensors of a size that does not depend on the
// boundaries. B batch, L queries, S keys, h query heads, g key heads, d width

#include "moesh/nn/attention_functions.h"

#include <ATen/ATen.h>
#include <ATen/SDPBackend.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "moesh/fsdp/recompute.h"
#include "moesh/kernels/meta/work.h"
#include "moesh/kernels/rowwise.h"
#include "moesh/spmd/attach.h"

namespace moesh::nn {
namespace {

using kernels::AttentionConfig;
using kernels::AttentionInput;

// Keys before a query that it sees; nothing: all.
std::optional<std::int64_t> reach_of(std::int64_t window) {
  return window > 0 ? std::optional(window - 1) : std::nullopt;
}

// As document_boundaries has them, where there are any.
struct Boundaries {
  std::optional<at::Tensor> queries = {}, keys = {};
  std::int64_t most_queries, most_keys;  // of one document

  std::int64_t num() const { return queries->size(0) - 1; }
};

// With documents y is [T, h, d] and lse [h, T], else [B, L, h, d] and [B, h, L].
struct FlashOutput {
  at::Tensor y, lse;
  at::Tensor seed = {}, offset = {};  // for cuDNN's dropout, which is not used
};

at::Tensor heads_first(const at::Tensor& x) { return x.transpose(1, 2); }

FlashOutput run_by_cudnn(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         double scale) {
  const auto out = at::_scaled_dot_product_cudnn_attention(
      heads_first(q), heads_first(k), heads_first(v), {}, /*compute_log_sumexp=*/true, 0.0,
      /*is_causal=*/true, /*return_debug_mask=*/false, scale);
  return {heads_first(std::get<0>(out)), std::get<1>(out).flatten(2), std::get<6>(out),
          std::get<7>(out)};
}

// Documents are taken for one that is as long as the sequence.
void note_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const Boundaries& b, std::int64_t window, bool is_backward) {
  const auto size = [](const at::Tensor& t, std::int64_t dim) {
    return static_cast<double>(t.size(dim));
  };
  const auto num_queries = static_cast<double>(b.most_queries);
  kernels::meta::note_attention(
      {.batch = static_cast<double>(q.numel()) / (num_queries * size(q, -2) * size(q, -1)),
       .num_queries = num_queries,
       .num_keys = static_cast<double>(b.most_keys),
       .num_heads = size(q, -2),
       .num_groups = size(k, -2),
       .width = size(q, -1),
       .value_width = size(v, -1),
       .window = static_cast<double>(window)},
      is_backward);
}

FlashOutput run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Boundaries& b,
                double scale, std::int64_t window) {
  if (q.is_meta()) {
    note_attention(q, k, v, b, window, /*is_backward=*/false);
    auto shape = q.sizes().vec();
    shape.pop_back();
    std::swap(shape[shape.size() - 2], shape[shape.size() - 1]);
    return {at::empty(q.sizes(), q.options()), at::empty(shape, q.options().dtype(at::kFloat))};
  }
  const auto out = at::_flash_attention_forward(
      q, k, v, b.queries, b.keys, b.most_queries, b.most_keys,
      /*dropout_p=*/0, /*is_causal=*/true,
      /*return_debug_mask=*/false, scale, reach_of(window), /*window_size_right=*/0);
  return {std::get<0>(out), std::get<1>(out)};
}

// Without a window, documents and keys before the first query cuDNN's kernel does, which is faster
// on Hopper.
bool takes_cudnn(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Boundaries& b,
                 double scale, std::int64_t window) {
  if (q.is_meta() || b.queries || window > 0 || q.size(1) != k.size(1)) return false;
  const auto kernel = static_cast<at::SDPBackend>(
      at::_fused_sdp_choice(heads_first(q), heads_first(k), heads_first(v), {}, 0.0,
                            /*is_causal=*/true, scale, /*enable_gqa=*/q.size(2) != k.size(2)));
  return kernel == at::SDPBackend::cudnn_attention;
}

FlashOutput kept_or_run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& sinks, const Boundaries& b, double scale,
                        std::int64_t window) {
  constexpr const char* kWhat = "attention with a window, sinks or documents";
  if (const auto first = raw::recall(kWhat))
    return {(*first)[0], (*first)[1], (*first)[2], (*first)[3]};
  FlashOutput r = takes_cudnn(q, k, v, b, scale, window) ? run_by_cudnn(q, k, v, scale)
                                                         : run(q, k, v, b, scale, window);
  if (sinks.defined()) r.lse = kernels::add_sinks_(r.y, r.lse, sinks);
  raw::keep(kWhat, {r.y, r.lse, r.seed, r.offset});
  return r;
}

// Memory that the kernel holds in backward besides its results: d(q) summed in float32, with room
// for 128 more rows of each document, and d(k) and d(v) of every query head before they are summed
// over a group.
std::vector<at::Tensor> held_in_backward(const at::Tensor& q, const at::Tensor& k,
                                         const Boundaries& b) {
  auto rows = q.sizes().vec(), of_heads = k.sizes().vec();
  if (b.queries) rows[0] += 128 * b.num();
  of_heads[of_heads.size() - 2] = q.size(-2);
  return {at::empty(rows, q.options().dtype(at::kFloat)), at::empty(of_heads, k.options()),
          at::empty(of_heads, k.options())};
}

// `saved` as flash() has them.
raw::Tensors gradients(const raw::Tensors& saved, const at::Tensor& dy, const Boundaries& b,
                       double scale, std::int64_t window) {
  const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &sinks = saved[3], &y = saved[4],
                   &lse = saved[5];
  at::Tensor d_sinks;
  if (sinks.defined()) d_sinks = kernels::sink_gradient(y, lse, sinks, dy);
  if (q.is_meta()) {
    note_attention(q, k, v, b, window, /*is_backward=*/true);
    const auto held = held_in_backward(q, k, b);
    return {at::empty(q.sizes(), q.options()), at::empty(k.sizes(), k.options()),
            at::empty(v.sizes(), v.options()), d_sinks};
  }
  if (const at::Tensor &seed = saved[6], &offset = saved[7]; seed.defined()) {
    const at::Tensor none;
    const auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
        heads_first(dy), heads_first(q), heads_first(k), heads_first(v), heads_first(y),
        lse.unsqueeze(-1), seed, offset, none, none, none, b.most_queries, b.most_keys, 0.0,
        /*is_causal=*/true, scale);
    return {heads_first(dq), heads_first(dk), heads_first(dv), d_sinks};
  }
  const at::Tensor unused = at::empty({2}, q.options().dtype(at::kLong));  // seeds of dropout
  const auto [dq, dk, dv] = at::_flash_attention_backward(
      dy, q, k, v, y, lse, b.queries.value_or(at::Tensor()), b.keys.value_or(at::Tensor()),
      b.most_queries, b.most_keys, /*dropout_p=*/0, /*is_causal=*/true, unused, unused, scale,
      reach_of(window), /*window_size_right=*/0);
  return {dq, dk, dv, d_sinks};
}

at::Tensor flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const at::Tensor& sinks, const Boundaries& b, double scale, std::int64_t window) {
  return raw::differentiable({q, k, v, sinks}, [&]() -> raw::Differentiable {
    const FlashOutput r = kept_or_run(q, k, v, sinks, b, scale, window);
    return {{r.y},
            {q, k, v, sinks, r.y, r.lse, r.seed, r.offset},
            [b, scale, window](const auto& saved, const auto& dy) {
              return gradients(saved, dy[0].contiguous(), b, scale, window);
            }};
  })[0];
}

// The kernel wants compute capability 8.0, and so does everything that LibTorch would choose for
// these tensors but for its slow ways. (Asked without a mask, and not as causal: it is not known
// there that queries may be the last positions of the keys.)
bool has_fast_kernels(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  if (q.is_meta()) return true;
  const auto kernel = static_cast<at::SDPBackend>(at::_fused_sdp_choice(
      q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), {}, 0.0, /*is_causal=*/false,
      std::nullopt, /*enable_gqa=*/q.size(2) != k.size(2)));
  return kernel == at::SDPBackend::cudnn_attention || kernel == at::SDPBackend::flash_attention;
}

}  // namespace

DocumentBoundaries document_boundaries(const AttentionConfig& c, const at::Tensor& starts_BL) {
  const auto batch = starts_BL.size(0), length = starts_BL.size(1), num_keys = c.start + length,
             num = c.most_documents + batch, unused = num + 1;
  const at::Tensor query_L = at::arange(length, starts_BL.options()),
                   sequence_B1 = at::arange(batch, starts_BL.options()).unsqueeze(1);
  // The first query of this rank begins an entry even where its document began before.
  const at::Tensor is_first_BL = (starts_BL == query_L + c.start).logical_or(query_L == 0);
  const at::Tensor entry_BL =
      is_first_BL.flatten().cumsum(0).reshape({batch, length}) + sequence_B1;
  const at::Tensor place_T = at::where(is_first_BL, entry_BL, unused).flatten(),
                   unseen_B = entry_BL.select(1, 0) - 1;
  const auto filled = [&](std::int64_t end, const at::Tensor& first_BL, std::int64_t stride) {
    at::Tensor all = at::full({unused + 1}, end, starts_BL.options());
    all.scatter_(0, place_T, (first_BL + sequence_B1 * stride).flatten());
    all.scatter_(0, unseen_B, sequence_B1.squeeze(1) * stride);
    return all.narrow(0, 0, num + 1).to(at::kInt);
  };
  const at::Tensor first_key_BL =
      at::where(query_L == 0, starts_BL.clamp_min(0), query_L + c.start);
  return {.queries = filled(batch * length, query_L.expand_as(starts_BL), length),
          .keys = filled(batch * num_keys, first_key_BL, num_keys)};
}

bool takes_flash_attention(const AttentionConfig& c, const AttentionInput& in) {
  const auto &q = in.q_BLhd, &k = in.k_BSgd, &v = in.v_BSgv;
  const auto all = k.size(1), width = q.size(3);
  const bool has_window = c.window > 0 && c.window < all, has_documents = in.starts_BL.defined(),
             has_keys_before = c.start > 0;  // of other cp ranks
  // In documents chunks count from where each begins, which may be before the first key: one may
  // end between the keys, however few they are.
  const bool fits = v.size(3) <= width && (has_documents || c.start + q.size(1) == all);
  return (q.is_cuda() || q.is_meta()) && q.scalar_type() == at::kBFloat16 && q.numel() > 0 &&
         (has_window || in.sinks_h.defined() || has_documents || has_keys_before) &&
         (c.chunk == 0 || (c.chunk >= all && !has_documents)) && fits && width % 8 == 0 &&
         width <= 256 && has_fast_kernels(q, k, v);
}

at::Tensor flash_attention(const AttentionConfig& c, const AttentionInput& in) {
  const auto rows = [](const at::Tensor& t) { return t.stride(-1) == 1 ? t : t.contiguous(); };
  const auto batch = in.q_BLhd.size(0), length = in.q_BLhd.size(1), num_keys = c.start + length,
             window = c.window < in.k_BSgd.size(1) ? c.window : 0;
  // The kernel wants values as wide as keys.
  const auto width = in.q_BLhd.size(3), value_width = in.v_BSgv.size(3);
  const at::Tensor values =
      value_width < width ? at::constant_pad_nd(in.v_BSgv, {0, width - value_width}) : in.v_BSgv;
  const auto of_values = [&](const at::Tensor& y) {
    return value_width < width ? y.narrow(3, 0, value_width) : y;
  };
  if (!in.starts_BL.defined())
    return of_values(flash(rows(in.q_BLhd), rows(in.k_BSgd), rows(values), in.sinks_h,
                           {.most_queries = length, .most_keys = num_keys}, c.scale, window));
  const DocumentBoundaries b = document_boundaries(c, in.starts_BL);
  // No query sees the keys behind the last query.
  const auto flat = [&](const at::Tensor& t, std::int64_t num) {
    return rows(t.narrow(1, 0, num).flatten(0, 1));
  };
  const at::Tensor y_Thd =
      flash(flat(in.q_BLhd, length), flat(in.k_BSgd, num_keys), flat(values, num_keys), in.sinks_h,
            {b.queries, b.keys, length, num_keys}, c.scale, window);
  return of_values(y_Thd.unflatten(0, {batch, length}));
}

}  // namespace moesh::nn
