// B batch, L tokens of this cp rank, D model, V vocabulary of this tp rank

#include "moesh/models/decoder.h"

#include <ATen/ATen.h>

#include "moesh/base/error.h"
#include "moesh/nn/recompute.h"
#include "moesh/nn/residual.h"
#include "moesh/nn/vocabulary.h"
#include "moesh/spmd/reshard.h"

namespace moesh::models {
namespace {

using enum Place;
using nn::Full;
using nn::Stream;
using nn::Tokens;

struct Block {
  nn::RmsNorm attention_norm, ffn_norm;
  std::unique_ptr<nn::Attention> attention;
  std::optional<nn::Mlp> mlp;
  std::optional<nn::Moe> moe;

  Block(const DecoderPlan& plan, std::int64_t layer, const ModelOptions& m,
        const nn::ModuleOptions& o) {
    const auto& c = plan.config;
    const std::string name = "model.layers." + std::to_string(layer);
    attention_norm = nn::RmsNorm(name + ".input_layernorm", c.dim, c.norm_eps, o.dtype, o.device);
    attention = plan.attention(layer, name + ".self_attn", o);
    ffn_norm =
        nn::RmsNorm(name + ".post_attention_layernorm", c.dim, c.norm_eps, o.dtype, o.device);
    if (!plan.is_moe(layer)) {
      mlp.emplace(name + "." + plan.mlp_name, c.dim, plan.ffn, o);
      return;
    }
    nn::MoeConfig config = plan.moe;
    config.name = name + "." + plan.mlp_name;
    config.router.num_experts = config.experts.num_experts = c.num_experts;
    config.router.top_k = c.top_k;
    config.router.forced_balance = m.forced_balance;
    config.experts.dim = c.dim, config.experts.ffn = c.moe_ffn;
    config.dispatcher = m.dispatcher;
    config.dtype = o.dtype, config.device = o.device, config.init = o.init;
    moe.emplace(config);
  }

  void each_param(const std::function<void(Stored&)>& f) {
    const auto visit = [&](auto& w) { f(w.stored()); };
    attention_norm.each_param(visit);
    attention->each_param(f);
    ffn_norm.each_param(visit);
    if (mlp) mlp->each_param(visit);
    if (moe) moe->each_param(visit);
  }

  std::vector<const Stored*> stored() {
    std::vector<const Stored*> all;
    each_param([&](Stored& w) { all.push_back(&w); });
    return all;
  }
};

bool is_expert(const Stored& w) { return w.storage == efsdp; }

// Matrices decay, each expert's own too; norms, biases and sinks do not.
bool decays(const Stored& w) { return w.spec.shape.size() > (is_expert(w) ? 2u : 1u); }

class Decoder final : public Model {
 public:
  Decoder(const DecoderPlan& plan, const ModelOptions& m) : config_(plan.config) {
    const auto& c = config_;
    const nn::ModuleOptions o{
        .dtype = m.dtype,
        .device = m.device,
        .init = {.kind = Init::Kind::normal, .scale = c.init_std, .seed = m.seed}};
    embedding_ = nn::Embedding("model.embed_tokens", c.vocab, c.dim, o.dtype, o.device, o.init);
    for (std::int64_t i = 0; i < c.num_layers; ++i)
      blocks_.push_back(std::make_unique<Block>(plan, i, m, o));
    norm_ = nn::RmsNorm("model.norm", c.dim, c.norm_eps, o.dtype, o.device);
    if (!c.tie_embeddings) head_ = nn::column("lm_head", c.vocab, c.dim, o);
  }

  ForwardResult forward(const MicroBatch& batch, const ForwardOptions& options) override {
    return options.sequence_parallel ? run<true>(batch, options) : run<false>(batch, options);
  }

  void each_param(const std::function<void(Stored&, bool)>& f) override {
    const auto visit = [&](Stored& w) { f(w, decays(w)); };
    visit(embedding_.weight().stored());
    for (auto& b : blocks_) b->each_param(visit);
    norm_.each_param([&](auto& w) { visit(w.stored()); });
    if (head_) visit(head_->stored());
  }

  std::vector<nn::Router*> routers() override {
    std::vector<nn::Router*> all;
    for (auto& b : blocks_)
      if (b->moe) all.push_back(&b->moe->router());
    return all;
  }

  std::int64_t num_parameters() const override { return count(config_.num_experts); }
  std::int64_t num_active_parameters() const override { return count(config_.top_k); }
  double flops_per_token(std::int64_t sequence) const override {
    const std::int64_t looked_up = config_.tie_embeddings ? 0 : config_.vocab * config_.dim;
    double sum = 6.0 * static_cast<double>(num_active_parameters() - looked_up);
    for (const auto& b : blocks_) sum += b->attention->flops(sequence);
    return sum;
  }

 private:
  template <bool Sp>
  struct BlockResult {
    Stream<Sp> x;
    nn::TokenSum auxiliary;
    nn::Route route;
  };

  template <bool Sp>
  BlockResult<Sp> run_block(Block& b, const Stream<Sp>& x, const Tokens& tokens,
                            const MicroBatch& batch, const ForwardOptions& options,
                            size_t moe_layer) {
    BlockResult<Sp> out;
    const Stream<Sp> after =
        x + nn::to_stream<Sp>(
                (*b.attention)(nn::to_full<Sp>(nn::norm<Sp>(b.attention_norm, x), tokens), tokens),
                tokens);
    const Stream<Sp> normed = nn::norm<Sp>(b.ffn_norm, after);
    if (b.mlp) {
      out.x = after + nn::to_stream<Sp>((*b.mlp)(nn::to_full<Sp>(normed, tokens)), tokens);
      return out;
    }
    nn::RouteOptions route{.pass = options.pass, .record_start = batch.index * tokens.num_global()};
    if (options.record && options.pass != nn::Pass::recompute)
      route.record = (*options.record)[moe_layer].get();
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
    add(weights.switch_weight,
        [&] { return nn::switch_loss(y.route, config, batch.num_step_tokens); });
    add(weights.sequence_weight,
        [&] { return nn::sequence_loss(y.route, config, tokens, batch.num_step_tokens); });
    add(weights.z_weight, [&] { return nn::z_loss(y.route, batch.num_step_tokens); });
    return out;
  }

  template <bool Sp>
  ForwardResult run(const MicroBatch& batch, const ForwardOptions& options) {
    const auto& ids = batch.input_ids_BL;
    MOESH_CHECK(ids.dim() == 2 && ids.size(1) <= config_.max_sequence, ErrorKind::config,
                "input_ids are ", ids.sizes(), "; the model takes sequences of up to ",
                config_.max_sequence, " tokens");
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
            [this, &b, tokens, batch, options, layer, &counts](const at::Tensor& input,
                                                               bool again) {
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
    const auto logits_BLV = linear(final, use(head_ ? *head_ : embedding_.weight()));
    if (options.capture) result.logits_BLV = local(logits_BLV).detach();
    result.cross_entropy = cross_entropy(logits_BLV, batch, tokens);
    result.loss =
        local(auxiliary).defined() ? result.cross_entropy + auxiliary : result.cross_entropy;
    return result;
  }

  // Of this rank's tokens, divided by those of the step.
  nn::TokenSum cross_entropy(const Tensor<Dense{T, T, F}>& logits_BLV, const MicroBatch& batch,
                             const Tokens& tokens) const {
    const auto logits =
        declare<Dense{T, T, F}>([](const at::Tensor& t) { return t.flatten(0, 1); }, logits_BLV);
    const at::Tensor labels = tokens.my_block(batch.labels_BL).flatten();
    const auto per_token = nn::cross_entropy(logits, labels, config_.vocab);
    const auto divisor = static_cast<double>(batch.num_step_tokens);
    return once<tp>(scale(sum_all(per_token), 1.0 / divisor));
  }

  // Of the whole model, with this many experts in each layer.
  std::int64_t count(std::int64_t num_experts) const {
    std::int64_t sum = 0;
    const auto add = [&](const Stored& w) {
      std::int64_t numel = 1;
      for (auto n : w.spec.shape) numel *= n;
      sum += is_expert(w) ? numel / config_.num_experts * num_experts : numel;
    };
    const_cast<Decoder*>(this)->each_param([&](Stored& w, bool) { add(w); });  // nothing is changed
    return sum;
  }

  DecoderConfig config_;
  nn::Embedding embedding_;
  std::vector<std::unique_ptr<Block>> blocks_;
  nn::RmsNorm norm_;
  std::optional<nn::Cut> head_;  // none: the embedding
};

}  // namespace

std::unique_ptr<Model> make_decoder(const DecoderPlan& plan, const ModelOptions& options) {
  return std::make_unique<Decoder>(plan, options);
}

}  // namespace moesh::models
