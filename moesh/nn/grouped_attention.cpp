#include "moesh/nn/grouped_attention.h"

#include <ATen/ATen.h>

#include <cmath>

#include "moesh/base/error.h"
#include "moesh/spmd/tensor.h"

namespace moesh::nn {

void GroupedAttentionConfig::validate() const {
  const auto ranks = current_mesh().size(tp);
  MOESH_CHECK(num_heads >= 1 && num_kv_heads >= 1 && num_heads % num_kv_heads == 0,
              ErrorKind::config, "attention: num_heads = ", num_heads,
              " query heads do not divide into groups of num_kv_heads = ", num_kv_heads,
              "; choose a divisor");
  MOESH_CHECK(num_heads % ranks == 0, ErrorKind::config, "attention: num_heads = ", num_heads,
              " is not divisible by tp = ", ranks, "; choose a tp that divides the heads");
  MOESH_CHECK(num_kv_heads % ranks == 0, ErrorKind::config,
              "attention: num_kv_heads = ", num_kv_heads, " is not divisible by tp = ", ranks,
              ", and every tp rank holds its own; choose a tp that divides them");
  MOESH_CHECK(!rope || rope->dim <= head_dim, ErrorKind::config,
              "attention: rope.dim = ", rope ? rope->dim : 0,
              " rotated features of a head of head_dim = ", head_dim);
  MOESH_CHECK(window >= 0 && chunk >= 0, ErrorKind::config, "attention: window ", window,
              ", chunk ", chunk, "; both take 0 (none) or more");
  MOESH_CHECK(clip >= 0, ErrorKind::config, "attention: clip is ", clip,
              "; it takes 0 (none) or more");
  MOESH_CHECK(clip == 0 || qk_norm != QkNorm::weighted, ErrorKind::config, "attention: clip is ",
              clip, ", and heads that are normalised turn at once; leave out ", "one of them");
  MOESH_CHECK(!output_gate || qk_norm != QkNorm::across, ErrorKind::config,
              "attention: a norm across all heads of q, and an output gate among them; leave out ",
              "one of them");
  MOESH_CHECK(growth_floor >= 1, ErrorKind::config, "attention: growth_floor is ", growth_floor,
              "; it takes 1 or more");
}

GroupedAttention::GroupedAttention(const GroupedAttentionConfig& c, const std::string& name,
                                   const ModuleOptions& o)
    : config_((c.validate(), c)),
      options_{.scale = c.scale.value_or(std::pow(static_cast<double>(c.head_dim), -0.5)),
               .window = c.window,
               .chunk = c.chunk},
      rope_tables_(o.rope_tables),
      q_(column(name + ".q_proj", (c.output_gate ? 2 : 1) * c.num_heads * c.head_dim, c.dim, o,
                c.biases)),
      k_(column(name + ".k_proj", c.num_kv_heads * c.head_dim, c.dim, o, c.biases)),
      v_(column(name + ".v_proj", c.num_kv_heads * c.head_dim, c.dim, o, c.biases)),
      o_(row(name + ".o_proj", c.dim, c.num_heads * c.head_dim, o, c.output_bias)) {
  if (c.qk_norm == QkNorm::weighted) {
    q_norm_.emplace(name + ".q_norm", c.head_dim, c.norm_eps, o, c.norm_weight);
    k_norm_.emplace(name + ".k_norm", c.head_dim, c.norm_eps, o, c.norm_weight);
  }
  if (c.qk_norm == QkNorm::across) {
    q_across_.emplace(name + ".q_norm", c.num_heads * c.head_dim, c.norm_eps, o);
    k_across_.emplace(name + ".k_norm", c.num_kv_heads * c.head_dim, c.norm_eps, o);
  }
  // A score, like those it competes with.
  if (c.sinks) sinks_.emplace(o.wide_spec(name + ".sinks", {c.num_heads}, {{tp, 0}}), o.init);
}

Sum GroupedAttention::operator()(const Full& x_BLD, const Tokens& tokens, KvCache* kv_cache,
                                 MaxLogits* logits) const {
  const at::Tensor numbers = tokens.span_numbers();
  const std::int64_t width = config_.head_dim;
  const auto dtype = local(x_BLD).scalar_type();
  const auto device = local(x_BLD).device();
  std::optional<kernels::Rotation> turn;
  if (config_.rope)
    turn = rope_of(*rope_tables_, *config_.rope, tokens, x_BLD)
               .first_features(config_.rope->interleaved);
  const auto clipped = [&](const Heads& t) {
    if (config_.clip == 0) return t;
    return map_heads(
        [&](const at::Tensor& x) { return x.clamp_max(config_.clip).clamp_min(-config_.clip); }, t);
  };
  // Queries or keys, as scores take them.
  const auto ready = [&](const Heads& made, const std::optional<RmsNorm>& norm) {
    Heads t = clipped(norm ? norm->per_head(made, turn) : made);
    if (turn && !norm) t = map_heads([&](const at::Tensor& x) { return rotate(x, *turn); }, t);
    if (config_.qk_norm == QkNorm::plain)
      t = map_heads([&](const at::Tensor& x) { return rms_norm(x, {}, config_.norm_eps); }, t);
    return t;
  };
  auto all_k = k_(x_BLD, numbers);
  decltype(all_k) all_q;
  if (q_across_) {  // one message for both
    all_q = q_(x_BLD, numbers);
    const auto squares_2N = all_reduce<tp>(
        stack(std::vector{SplitRmsNorm::squares(all_q), SplitRmsNorm::squares(all_k)}));
    all_q = (*q_across_)(all_q, select(squares_2N, 0, 0));
    all_k = (*k_across_)(all_k, select(squares_2N, 0, 1));
  }
  const Heads k = ready(split_heads(all_k, width), k_norm_),
              v = clipped(split_heads(v_(x_BLD, numbers), width));
  std::optional<SeenKeys> seen;  // on their way while queries are made
  if (!kv_cache) seen.emplace(k, v, tokens, options_, logits);
  if (!q_across_) all_q = q_(x_BLD, numbers);
  const Heads with_gate = split_heads(all_q, config_.output_gate ? 2 * width : width);
  // The gradient of a slice is zeros and a copy, also where it is the whole.
  Heads q = ready(config_.output_gate ? narrow(with_gate, 3, 0, width) : with_gate, q_norm_);
  if (config_.growth != 0) {
    const auto wide = at::TensorOptions(device).dtype(wide_dtype(dtype));
    const at::Tensor in_sequence = as_tensor(tokens.positions(), wide);
    q = map_heads(
        [&](const at::Tensor& t, const at::Tensor& in_document) {
          const at::Tensor position = in_document.defined() ? in_document.to(wide) : in_sequence;
          const at::Tensor factor =
              1 + config_.growth * at::log1p(at::floor((position + 1) / config_.growth_floor));
          return (t * factor.unsqueeze(-1).unsqueeze(-1)).to(dtype);
        },
        q, tokens.document_positions());
  }
  const PerHead sinks = sinks_ ? use(*sinks_) : PerHead();
  Heads y;
  if (kv_cache) {
    const auto [keys, values] = kv_cache->add(all_positions(k, tokens), all_positions(v, tokens));
    y = attend(q, keys, values, sinks, tokens, options_, kv_cache);
    kv_cache->forget(options_);
  } else {
    y = seen->attend(q, sinks);
  }
  if (!config_.output_gate) return o_(merge_heads(y), numbers);
  const auto gated = [](const at::Tensor& t, const at::Tensor& gate) {
    return t * at::sigmoid(gate);
  };
  return o_(merge_heads(map_heads(gated, y, narrow(with_gate, 3, width, width))), numbers);
}

std::vector<LogitRows> GroupedAttention::logit_rows() {
  if (config_.qk_norm != QkNorm::none || config_.clip > 0) return {};
  const bool is_shared = config_.num_heads != config_.num_kv_heads;
  std::vector<LogitRows> rows;
  const auto add = [&](ColumnWeight& layer, std::int64_t of_head, double power) {
    layer.each_param(
        [&](auto& w) { rows.push_back({&w.stored(), of_head, 0, config_.head_dim, power}); });
  };
  add(q_, (config_.output_gate ? 2 : 1) * config_.head_dim, is_shared ? 1 : 0.5);
  if (!is_shared) add(k_, config_.head_dim, 0.5);
  return rows;
}

void GroupedAttention::each_param(const std::function<void(Stored&)>& f) {
  const auto visit = [&](auto& w) { f(w.stored()); };
  q_.each_param(visit), k_.each_param(visit), v_.each_param(visit);
  if (q_norm_) q_norm_->each_param(visit), k_norm_->each_param(visit);
  if (q_across_) q_across_->each_param(visit), k_across_->each_param(visit);
  if (sinks_) visit(*sinks_);
  o_.each_param(visit);
}

double GroupedAttention::flops(std::int64_t sequence) const {
  return 12.0 * static_cast<double>(config_.num_heads * config_.head_dim) *
         mean_visible(sequence, options_);
}

}  // namespace moesh::nn
