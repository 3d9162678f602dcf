// B batch, L tokens of this cp rank, D model, h heads of this tp rank, V vocabulary of this tp rank

#include "moesh/models/deepseek_v3.h"

#include <ATen/ATen.h>

#include "moesh/base/error.h"
#include "moesh/base/mutant.h"
#include "moesh/nn/attention.h"
#include "moesh/nn/mlp.h"
#include "moesh/nn/moe.h"
#include "moesh/nn/norm.h"
#include "moesh/nn/recompute.h"
#include "moesh/nn/residual.h"
#include "moesh/nn/vocabulary.h"
#include "moesh/spmd/once.h"
#include "moesh/spmd/reshard.h"

namespace moesh::models {
namespace {

using enum Place;
using nn::Full;
using nn::Heads;
using nn::Stream;
using nn::Sum;
using nn::Tokens;

// [B, L, h * d] -> [B, L, h, d]
Heads heads_of(const Tensor<Dense{T, T, F}>& x, std::int64_t width) {
  return declare<Heads::layout>([&](const at::Tensor& t) { return t.unflatten(-1, {t.size(-1) / width, width}); }, x);
}

/// Multi-head latent attention: keys and values come from a small latent, and one rotated key is shared by all heads.
class Mla {
 public:
  Mla(const DeepseekV3Config& c, const std::string& name, const nn::ModuleOptions& o)
      : nope_(c.qk_nope_dim), rope_dim_(c.qk_rope_dim), v_dim_(c.v_dim), latent_(c.kv_lora_rank), rope_(c.rope) {
    const std::int64_t qk = nope_ + rope_dim_;
    scale_ = std::pow(static_cast<double>(qk), -0.5) * c.rope.attention_factor();
    if (c.q_lora_rank > 0) {
      q_a_ = nn::whole(name + ".q_a_proj", c.q_lora_rank, c.dim, o);
      q_norm_.emplace(name + ".q_a_layernorm", c.q_lora_rank, 1e-6, o.dtype, o.device);
      q_ = nn::column(name + ".q_b_proj", c.num_heads * qk, c.q_lora_rank, o);
    } else {
      q_ = nn::column(name + ".q_proj", c.num_heads * qk, c.dim, o);
    }
    kv_a_ = nn::whole(name + ".kv_a_proj_with_mqa", latent_ + rope_dim_, c.dim, o);
    kv_norm_ = nn::RmsNorm(name + ".kv_a_layernorm", latent_, 1e-6, o.dtype, o.device);
    kv_b_ = nn::column(name + ".kv_b_proj", c.num_heads * (nope_ + v_dim_), latent_, o);
    o_ = nn::row(name + ".o_proj", c.dim, c.num_heads * v_dim_, o);
  }

  Sum operator()(const Full& x_BLD, const Tokens& tokens) const {
    const auto table =
        nn::rope_table(rope_, tokens.block_start(), tokens.block_length(), local(x_BLD).scalar_type(), local(x_BLD).device());
    const auto rotated = [&](const at::Tensor& t) { return nn::rotate(t, table, rope_.interleaved); };

    const auto q_in = q_a_ ? (*q_norm_)(linear(x_BLD, use(*q_a_))) : x_BLD;
    const Heads q = declare<Heads::layout>(
        [&](const at::Tensor& t) { return at::cat({t.narrow(-1, 0, nope_), rotated(t.narrow(-1, nope_, rope_dim_))}, -1); },
        heads_of(linear(q_in, use(q_)), nope_ + rope_dim_));

    const Full kv_a = linear(x_BLD, use(kv_a_));
    const Heads kv = heads_of(linear(kv_norm_(narrow(kv_a, -1, 0, latent_)), use(kv_b_)), nope_ + v_dim_);
    const Full shared_key = narrow(kv_a, -1, latent_, rope_dim_);
    const Heads k = declare<Heads::layout>(
        [&](const at::Tensor& t, const at::Tensor& key) {
          const at::Tensor turned = rotated(key.unsqueeze(2)).expand({-1, -1, t.size(2), -1});
          return at::cat({t.narrow(-1, 0, nope_), turned}, -1);
        },
        kv, shared_key);
    const Heads v = narrow(kv, -1, nope_, v_dim_);
    const Heads y = nn::attend(q, nn::all_positions(k, tokens), nn::all_positions(v, tokens), tokens, {.scale = scale_});
    return linear(declare<Heads::layout>([](const at::Tensor& t) { return t.flatten(2); }, y), use(o_));
  }

  template <class Fn>
  void each_param(Fn f) {
    if (q_a_) f(*q_a_), q_norm_->each_param(f);
    f(q_), f(kv_a_), kv_norm_.each_param(f), f(kv_b_), f(o_);
  }

 private:
  std::int64_t nope_, rope_dim_, v_dim_, latent_;
  nn::RopeConfig rope_;
  double scale_;
  std::optional<nn::Whole> q_a_;
  std::optional<nn::RmsNorm> q_norm_;
  nn::Cut q_;
  nn::Whole kv_a_;
  nn::RmsNorm kv_norm_;
  nn::Cut kv_b_, o_;
};

nn::MoeConfig moe_config(const DeepseekV3Config& c, const std::string& name, const ModelOptions& m, const nn::ModuleOptions& o) {
  nn::MoeConfig moe;
  moe.name = name;
  moe.router = {.num_experts = c.num_experts,
                .top_k = c.top_k,
                .scoring = nn::Scoring::sigmoid,
                .num_groups = c.num_groups,
                .top_groups = c.top_groups,
                .normalize = c.normalize,
                .scale = c.routed_scale,
                .forced_balance = m.forced_balance};
  moe.experts = {.num_experts = c.num_experts, .dim = c.dim, .ffn = c.moe_ffn};
  moe.shared_ffn = c.moe_ffn * c.num_shared;
  moe.dispatcher = m.dispatcher;
  moe.dtype = o.dtype, moe.device = o.device, moe.init = o.init;
  return moe;
}

struct Block {
  nn::RmsNorm attention_norm, ffn_norm;
  Mla attention;
  std::optional<nn::Mlp> mlp;
  std::optional<nn::Moe> moe;

  Block(const DeepseekV3Config& c, const std::string& name, bool is_dense, const ModelOptions& m, const nn::ModuleOptions& o)
      : attention_norm(name + ".input_layernorm", c.dim, c.norm_eps, o.dtype, o.device),
        ffn_norm(name + ".post_attention_layernorm", c.dim, c.norm_eps, o.dtype, o.device),
        attention(c, name + ".self_attn", o) {
    if (is_dense)
      mlp.emplace(name + ".mlp", c.dim, c.ffn, o);
    else
      moe.emplace(moe_config(c, name + ".mlp", m, o));
  }

  template <class Fn>
  void each_param(Fn f) {
    attention_norm.each_param(f), attention.each_param(f), ffn_norm.each_param(f);
    if (mlp) mlp->each_param(f);
    if (moe) moe->each_param(f);
  }

  std::vector<const Stored*> stored() {
    std::vector<const Stored*> all;
    each_param([&](auto& w) { all.push_back(&w.stored()); });
    return all;
  }
};

class DeepseekV3 final : public Model {
 public:
  DeepseekV3(const DeepseekV3Config& c, const ModelOptions& m) : config_(c) {
    c.validate();
    const nn::ModuleOptions o{
        .dtype = m.dtype, .device = m.device, .init = {.kind = Init::Kind::normal, .scale = c.init_std, .seed = m.seed}};
    embedding_ = nn::Embedding("model.embed_tokens", c.vocab, c.dim, o.dtype, o.device, o.init);
    for (std::int64_t i = 0; i < c.num_layers; ++i)
      blocks_.push_back(std::make_unique<Block>(c, "model.layers." + std::to_string(i), i < c.num_dense_layers, m, o));
    norm_ = nn::RmsNorm("model.norm", c.dim, c.norm_eps, o.dtype, o.device);
    head_ = nn::column("lm_head", c.vocab, c.dim, o);
  }

  ForwardResult forward(const MicroBatch& batch, const ForwardOptions& options) override {
    return options.sequence_parallel ? run<true>(batch, options) : run<false>(batch, options);
  }

  void each_param(const std::function<void(Stored&, bool)>& f) override {
    const auto visit = [&](auto& w) { f(w.stored(), w.stored().spec.shape.size() > 1); };
    visit(embedding_.weight());
    for (auto& b : blocks_) b->each_param(visit);
    norm_.each_param(visit);
    visit(head_);
  }

  std::vector<nn::Router*> routers() override {
    std::vector<nn::Router*> all;
    for (auto& b : blocks_)
      if (b->moe) all.push_back(&b->moe->router());
    return all;
  }

  std::int64_t num_parameters() const override { return count(config_.num_experts); }
  std::int64_t num_active_parameters() const override { return count(config_.top_k); }
  double attention_flops(std::int64_t sequence) const override {
    const double per_pair = static_cast<double>(config_.num_heads * (config_.qk_nope_dim + config_.qk_rope_dim + config_.v_dim));
    return 6.0 * static_cast<double>(config_.num_layers) * per_pair * static_cast<double>(sequence) /
           2;  // causal: half of the pairs
  }

 private:
  template <bool Sp>
  struct BlockResult {
    Stream<Sp> x;
    nn::TokenSum auxiliary;
    nn::Route route;
  };

  template <bool Sp>
  BlockResult<Sp> run_block(Block& b, const Stream<Sp>& x, const Tokens& tokens, const MicroBatch& batch,
                            const ForwardOptions& options, size_t moe_layer) {
    BlockResult<Sp> out;
    const Stream<Sp> after =
        x + nn::to_stream<Sp>(b.attention(nn::to_full<Sp>(nn::norm<Sp>(b.attention_norm, x), tokens), tokens), tokens);
    const Stream<Sp> normed = nn::norm<Sp>(b.ffn_norm, after);
    if (b.mlp) {
      out.x = after + nn::to_stream<Sp>((*b.mlp)(nn::to_full<Sp>(normed, tokens)), tokens);
      return out;
    }
    nn::RouteOptions route{.pass = options.pass, .record_start = batch.index * tokens.num_global()};
    if (options.record && options.pass != nn::Pass::recompute) route.record = (*options.record)[moe_layer].get();
    if (options.replay) route.replay = (*options.replay)[moe_layer].get();
    const auto y = (*b.moe)(normed, tokens, route);
    out.x = after + y.y;
    out.route = y.route;
    const auto& weights = options.auxiliary;
    const auto& config = b.moe->router().config();
    const auto add = [&](double weight, const auto& term) {
      if (weight == 0) return;
      const auto t = scale(term(), weight);
      out.auxiliary = local(out.auxiliary).defined() ? out.auxiliary + t : t;
    };
    add(weights.switch_weight, [&] { return nn::switch_loss(y.route, config, batch.num_step_tokens); });
    add(weights.sequence_weight, [&] { return nn::sequence_loss(y.route, config, tokens, batch.num_step_tokens); });
    add(weights.z_weight, [&] { return nn::z_loss(y.route, batch.num_step_tokens); });
    return out;
  }

  template <bool Sp>
  ForwardResult run(const MicroBatch& batch, const ForwardOptions& options) {
    const auto& ids = batch.input_ids_BL;
    MOESH_CHECK(ids.dim() == 2 && ids.size(1) <= config_.max_sequence, ErrorKind::config, "input_ids are ", ids.sizes(),
                "; the model takes sequences of up to ", config_.max_sequence, " tokens");
    const Tokens tokens(current_mesh(), ids.size(0), ids.size(1), Sp);
    ForwardResult result;
    Stream<Sp> x = nn::to_stream<Sp>(embedding_(tokens.my_block(ids)), tokens);
    if (options.capture) {
      result.input = local(x);
      if (result.input.requires_grad()) result.input.retain_grad();
    }
    nn::TokenSum auxiliary;
    size_t moe_layer = 0;
    for (size_t i = 0; i < blocks_.size(); ++i) {
      Block& b = *blocks_[i];
      // The parameters of the next block travel while this one computes.
      if (options.reshard && i + 1 < blocks_.size()) prefetch(blocks_[i + 1]->stored());
      const size_t layer = moe_layer;
      if (b.moe) ++moe_layer;
      nn::TokenSum term;
      if (options.recompute && options.pass == nn::Pass::training) {
        at::Tensor counts;
        const auto outputs = nn::recompute(
            [this, &b, tokens, batch, options, layer, &counts](const at::Tensor& input, bool again) {
              ForwardOptions o = options;
              if (again) o.pass = nn::Pass::recompute;
              auto r = run_block<Sp>(b, assume<Stream<Sp>::layout>(input), tokens, batch, o, layer);
              if (!again && local(r.route.counts_E).defined()) counts = local(r.route.counts_E);
              return std::vector<at::Tensor>{local(r.x), local(r.auxiliary)};
            },
            local(x));
        x = assume<Stream<Sp>::layout>(outputs[0]);
        term = assume<nn::TokenSum::layout>(outputs[1]);
        if (b.moe) result.counts_E.push_back(counts);
      } else {
        std::optional<ReshardScope> scope;
        if (options.reshard) x = assume<Stream<Sp>::layout>(scope.emplace().enter(local(x)));
        auto r = run_block<Sp>(b, x, tokens, batch, options, layer);
        x = scope ? assume<Stream<Sp>::layout>(scope->leave(local(r.x))) : r.x;
        term = r.auxiliary;
        if (b.moe) result.counts_E.push_back(local(r.route.counts_E));
      }
      if (local(term).defined()) auxiliary = local(auxiliary).defined() ? auxiliary + term : term;
    }
    const Full final = nn::to_full<Sp>(nn::norm<Sp>(norm_, x), tokens);
    const auto logits_BLV = linear(final, use(head_));
    if (options.capture) result.logits_BLV = local(logits_BLV).detach();
    const auto logits = declare<Dense{T, T, F}>([](const at::Tensor& t) { return t.flatten(0, 1); }, logits_BLV);
    at::Tensor labels = tokens.my_block(batch.labels_BL).flatten();
    if (MOESH_MUTANT(labels_shifted_after_the_cut)) {  // the next token of this block, unknown at its end
      const at::Tensor block = tokens.my_block(ids);
      labels = at::cat({block.narrow(1, std::min<std::int64_t>(1, block.size(1)), std::max<std::int64_t>(0, block.size(1) - 1)),
                        at::full({block.size(0), std::min<std::int64_t>(1, block.size(1))}, -100, block.options())},
                       1)
                   .flatten();
    }
    const auto per_token = nn::cross_entropy(logits, labels, config_.vocab);
    double divisor = static_cast<double>(batch.num_step_tokens);
    if (MOESH_MUTANT(loss_averaged_per_rank)) divisor = std::max(1.0, labels.ne(-100).sum().item<double>());
    result.cross_entropy = once<tp>(scale(sum_all(per_token), 1.0 / divisor));
    result.loss = local(auxiliary).defined() ? result.cross_entropy + auxiliary : result.cross_entropy;
    return result;
  }

  std::int64_t count(std::int64_t experts) const {
    const auto& c = config_;
    const std::int64_t qk = c.qk_nope_dim + c.qk_rope_dim;
    const std::int64_t q = c.q_lora_rank ? c.q_lora_rank * (c.dim + 1 + c.num_heads * qk) : c.dim * c.num_heads * qk;
    const std::int64_t attention = q + (c.kv_lora_rank + c.qk_rope_dim) * c.dim + c.kv_lora_rank +
                                   c.num_heads * (c.qk_nope_dim + c.v_dim) * c.kv_lora_rank + c.dim * c.num_heads * c.v_dim;
    const std::int64_t dense = 3 * c.dim * c.ffn, moe = c.num_experts * c.dim + 3 * c.dim * c.moe_ffn * (experts + c.num_shared);
    return 2 * c.vocab * c.dim + c.dim + c.num_layers * (attention + 2 * c.dim) + c.num_dense_layers * dense +
           (c.num_layers - c.num_dense_layers) * moe;
  }

  DeepseekV3Config config_;
  nn::Embedding embedding_;
  std::vector<std::unique_ptr<Block>> blocks_;
  nn::RmsNorm norm_;
  nn::Cut head_;
};

}  // namespace

void DeepseekV3Config::validate() const {
  const auto& mesh = current_mesh();
  MOESH_CHECK(num_heads % mesh.size(tp) == 0, ErrorKind::config, "deepseek_v3: num_heads = ", num_heads,
              " do not divide by tp = ", mesh.size(tp), "; choose a tp that divides the heads");
  MOESH_CHECK(num_dense_layers >= 0 && num_dense_layers <= num_layers, ErrorKind::config,
              "deepseek_v3: num_dense_layers = ", num_dense_layers, " of num_layers = ", num_layers);
  MOESH_CHECK(rope.dim == qk_rope_dim, ErrorKind::config, "deepseek_v3: rope.dim = ", rope.dim,
              " and qk_rope_dim = ", qk_rope_dim, " must be equal");
}

DeepseekV3Config DeepseekV3Config::named(const std::string& size) {
  DeepseekV3Config c;
  if (size == "tiny") {
    c.num_groups = 2, c.top_groups = 1, c.q_lora_rank = 12, c.num_heads = 8, c.init_std = 0.2;
  } else if (size == "debug") {
    c = {.vocab = 2048,
         .dim = 256,
         .num_layers = 6,
         .num_dense_layers = 1,
         .ffn = 1024,
         .moe_ffn = 256,
         .num_heads = 16,
         .q_lora_rank = 0,
         .kv_lora_rank = 512,
         .qk_nope_dim = 128,
         .qk_rope_dim = 64,
         .v_dim = 128,
         .num_experts = 8,
         .num_shared = 2,
         .top_k = 3};
  } else if (size == "16b") {
    c = {.vocab = 102400,
         .dim = 2048,
         .num_layers = 27,
         .num_dense_layers = 1,
         .ffn = 10944,
         .moe_ffn = 1408,
         .num_heads = 16,
         .q_lora_rank = 0,
         .kv_lora_rank = 512,
         .qk_nope_dim = 128,
         .qk_rope_dim = 64,
         .v_dim = 128,
         .num_experts = 64,
         .num_shared = 2,
         .top_k = 6};
    c.rope.factor = 40, c.rope.mscale = 0.707, c.rope.mscale_all_dim = 0.707;
    c.max_sequence = 163840;
  } else if (size == "671b") {
    c = {.vocab = 129280,
         .dim = 7168,
         .num_layers = 61,
         .num_dense_layers = 3,
         .ffn = 18432,
         .moe_ffn = 2048,
         .num_heads = 128,
         .q_lora_rank = 1536,
         .kv_lora_rank = 512,
         .qk_nope_dim = 128,
         .qk_rope_dim = 64,
         .v_dim = 128,
         .num_experts = 256,
         .num_shared = 1,
         .top_k = 8,
         .num_groups = 8,
         .top_groups = 4};
    c.routed_scale = 2.5;
    c.rope.factor = 40, c.rope.mscale = 1, c.rope.mscale_all_dim = 1;
    c.max_sequence = 163840;
  } else {
    throw Error(ErrorKind::config, "deepseek_v3 has no size '" + size + "'; it comes as tiny, debug, 16b or 671b");
  }
  c.rope.dim = c.qk_rope_dim;
  c.rope.interleaved = true;
  return c;
}

std::unique_ptr<Model> make_deepseek_v3(const DeepseekV3Config& config, const ModelOptions& options) {
  return std::make_unique<DeepseekV3>(config, options);
}

}  // namespace moesh::models
