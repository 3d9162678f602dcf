// B batch, L tokens of this cp rank, D model, V vocabulary of this tp rank

#include "moesh/models/stage.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/fsdp/recompute.h"
#include "moesh/fsdp/reduce.h"
#include "moesh/fsdp/reshard.h"
#include "moesh/nn/residual.h"

namespace moesh::models {
namespace {

std::int64_t numel(const Stored& w) {
  std::int64_t product = 1;
  for (auto n : w.spec.shape) product *= n;
  return product;
}

// [B, L, 1]: at each position the token n positions later; a value that is not a word past the end.
at::Tensor moved_back(const at::Tensor& x_BL1, std::size_t n) {
  const auto by = std::min(static_cast<std::int64_t>(n), x_BL1.size(1));
  return at::constant_pad_nd(x_BL1.narrow(1, by, x_BL1.size(1) - by), {0, 0, 0, by}, kIgnoredLabel);
}

}  // namespace

Stage::Stage(const DecoderPlan& plan, const ModelOptions& m, LayerRange range, const Stage* first)
    : config_(plan.config),
      embedding_scale_(plan.embedding_scale),
      logits_scale_(plan.logits_scale),
      is_first_(range.begin == 0) {
  const auto& c = config_;
  MOESH_CHECK(0 <= range.begin && range.begin <= range.end && range.end <= c.num_layers,
              ErrorKind::config, "a stage of the blocks [", range.begin, ", ", range.end,
              ") of a decoder with ", c.num_layers);
  const nn::ModuleOptions o{
      .dtype = m.dtype,
      .device = m.device,
      .init = {.kind = Init::Distribution::normal, .scale = c.init_std, .seed = m.seed},
      .bias_init =
          Init{.kind = c.bias_std > 0 ? Init::Distribution::normal : Init::Distribution::zeros,
               .scale = c.bias_std,
               .seed = m.seed},
      .lora = m.lora,
      .float8 = m.float8};
  // Block by block: what is frozen takes less memory, and its master weights are gone by then.
  const auto freeze = [&](Stored& w) {
    if (!m.is_frozen || !m.is_frozen(w.spec.name)) return;
    const auto how = m.quantization ? m.quantization(w.spec.name) : std::nullopt;
    how ? raw::quantize(w, *how, c.init_std) : raw::freeze(w);
  };
  const bool is_last = range.end == c.num_layers,
             ends_with_embedding = is_last && (c.tie_embeddings || plan.num_mtp_layers > 0);
  if (ends_with_embedding && !is_first_ && first) embedding_ = first->embedding_;
  if (!embedding_ && (is_first_ || ends_with_embedding)) {
    has_own_embedding_ = true;
    embedding_ = std::make_shared<nn::Embedding>("model.embed_tokens", c.vocab, c.dim, o);
    embedding_->weight().stored().is_of_other_stage = !is_first_;
    freeze(embedding_->weight().stored());
  }
  for (std::int64_t i = 0; i < range.begin; ++i) first_moe_layer_ += plan.is_moe(i);
  for (std::int64_t i = range.begin; i < range.end; ++i) {
    blocks_.push_back(std::make_unique<Block>(plan, i, m, o));
    blocks_.back()->each_param(freeze);
  }
  if (is_last) {
    norm_.emplace("model.norm", c.dim, c.norm_eps, o, plan.norm_weight);
    norm_->each_param([&](auto& w) { freeze(w.stored()); });
    if (!c.tie_embeddings) {
      head_ = nn::Cut(o.spec("lm_head.weight", {c.vocab, c.dim}, {{tp, 0}}), o.init);
      head_->stored().spec.is_matrix = false;
      freeze(head_->stored());
    }
    for (std::int64_t k = 0; k < plan.num_mtp_layers; ++k) {
      mtp_.push_back(std::make_unique<MtpLayer>(plan, c.num_layers + k, m, o));
      mtp_.back()->each_param(freeze);
    }
  }
  each_param([&](Stored& w) {
    const bool is_expert = w.storage == efsdp;
    num_parameters_ += numel(w);
    const std::int64_t num_active = is_expert ? numel(w) / c.num_experts * c.top_k : numel(w);
    num_active_ += num_active;
    if (!w.spec.trained) num_frozen_active_ += num_active;
  });
}

nn::Tokens Stage::tokens_of(const MicroBatch& batch, const ForwardOptions& options) const {
  const auto& ids = batch.input_ids_BL;
  const std::int64_t before = options.kv_cache ? options.kv_cache->num_tokens : 0;
  MOESH_CHECK(ids.dim() == 2 && before + ids.size(1) <= config_.max_sequence, ErrorKind::config,
              "input_ids are ", ids.sizes(), ", after ", before,
              " tokens; the model takes sequences of up to ", config_.max_sequence, " tokens");
  // An evaluation drops nothing.
  const bool is_training = options.pass != nn::Pass::evaluation;
  return {current_mesh(),
          ids.size(0),
          ids.size(1),
          options.sequence_parallel,
          options.sequence_cut,
          batch.valid_BL(),
          batch.documents,
          before,
          is_training ? batch.samples_B : at::Tensor()};
}

template <bool Sp>
nn::Stream<Sp> Stage::embedded(const at::Tensor& ids_BL, const nn::Tokens& tokens) const {
  const auto x = nn::to_stream<Sp>((*embedding_)(tokens.my_span(ids_BL)), tokens.over_tp());
  return embedding_scale_ == 1 ? x : scale(x, embedding_scale_);
}

template <bool Sp>
nn::Stream<Sp> Stage::embed(const MicroBatch& batch, const nn::Tokens& tokens,
                            const ForwardOptions& options) const {
  RECORD_USER_SCOPE("embedding");
  MOESH_CHECK(is_first_, "embed of a stage that does not begin with the first block");
  const auto x = embedded<Sp>(batch.input_ids_BL, tokens);
  if (options.probe) options.probe->on_input(local(x));
  return x;
}

template <bool Sp>
BlockOutput<Sp> Stage::run_block(BlockRun& run, const nn::Stream<Sp>& input,
                                 const MicroBatch& batch, const nn::Tokens& tokens,
                                 const ForwardOptions& options, std::int64_t moe_layer) {
  Block& block = *run.block;
  const nn::Stream<Sp> x = begin_bucket(input);
  // Backward ends where nothing before is trained.
  const bool has_backward = local(x).requires_grad() || block.is_trained();
  if (!has_backward) run.block = nullptr;
  if (options.recompute != Recompute::none && options.pass == nn::Pass::training && has_backward)
    return recompute(
        [&block, before = run.before, tokens, batch, options, moe_layer](
            const nn::Stream<Sp>& stream, bool again) {
          ForwardOptions o = options;
          if (again) o.pass = nn::Pass::recompute;
          // Backward comes to the block before this one next.
          if (again && options.reshard) {
            prefetch(block.stored());
            if (before) prefetch(before->stored());
          }
          return block.run<Sp>(stream, tokens, batch, o, moe_layer);
        },
        x, options.recompute == Recompute::selective ? Keep::expensive : Keep::nothing);
  if (!options.reshard) return block.run<Sp>(x, tokens, batch, options, moe_layer);
  ReshardScope scope(run.gathers_before);
  run.gathers_before = has_backward ? scope.gathers() : nullptr;
  auto out = block.run<Sp>(scope.enter(x), tokens, batch, options, moe_layer);
  std::get<0>(out) = scope.leave(std::get<0>(out));
  return out;
}

template <bool Sp>
StageOutput<Sp> Stage::run_blocks(const nn::Stream<Sp>& x_BLD, const MicroBatch& batch,
                                  const nn::Tokens& tokens, const ForwardOptions& options) {
  StageOutput<Sp> out{.x_BLD = x_BLD};
  std::int64_t moe_layer = first_moe_layer_;
  BlockRun run;
  if (!options.reshard)
    for (const auto& block : blocks_) keep_gathered(block->stored());
  for (size_t i = 0; i < blocks_.size(); ++i) {
    // The parameters of the next block travel while this one computes.
    for (size_t next : {i, i + 1})
      if (options.reshard && next < blocks_.size()) prefetch(blocks_[next]->stored());
    if (options.reshard) cast_ahead(blocks_[i]->stored());
    run.before = std::exchange(run.block, blocks_[i].get());
    const auto [x, auxiliary, counts_E] =
        run_block<Sp>(run, out.x_BLD, batch, tokens, options, moe_layer);
    out.x_BLD = x;
    out.auxiliary = sum_of_defined(out.auxiliary, auxiliary);
    if (!blocks_[i]->is_moe()) continue;
    out.counts_E.push_back(counts_E);
    ++moe_layer;
  }
  return out;
}

template <bool Sp>
nn::Full Stage::to_head(const nn::Stream<Sp>& normed_BLD, const nn::Tokens& tokens) const {
  const nn::Full x = nn::to_full<Sp>(normed_BLD, tokens.over_tp());
  return logits_scale_ == 1 ? x : scale(x, logits_scale_);  // here, where it is small
}

Stage::HeadWeight Stage::head_weight(raw::LateGradient late) const {
  return use(head_ ? *head_ : embedding_->weight(), late);
}

bool Stage::is_head_trained() const {
  return (head_ ? head_->stored() : embedding_->weight().stored()).spec.trained;
}

nn::TokenSum Stage::loss_of(const nn::Full& x_BLD, const HeadWeight& weight,
                            const at::Tensor& labels_BL, const MicroBatch& batch,
                            const nn::Tokens& tokens) const {
  const at::Tensor labels = tokens.my_span(labels_BL).flatten();
  const auto sum = nn::cross_entropy(flatten(x_BLD, 0, 1), weight, labels, config_.vocab);
  return once<tp>(scale(sum, batch.num_step_tokens.reciprocal()));
}

nn::OfSpan Stage::choices(const nn::Full& x_BLD, const HeadWeight& weight) const {
  return unflatten(nn::best_words(flatten(x_BLD, 0, 1), weight, config_.vocab), 0,
                   {local(x_BLD).size(0), local(x_BLD).size(1), 1});
}

template <bool Sp>
HeadOutput Stage::head(const nn::Stream<Sp>& x_BLD, const MicroBatch& batch,
                       const nn::Tokens& tokens, const ForwardOptions& options) {
  RECORD_USER_SCOPE("head");
  MOESH_CHECK(norm_, "head of a stage that does not end with the last block");
  const nn::Stream<Sp> read = nn::norm<Sp>(*norm_, begin_bucket(x_BLD));
  const nn::Full x = to_head<Sp>(read, tokens);
  // The gradient is there with the loss: to keep it for later would cost as much memory again.
  const HeadWeight weight = head_weight(raw::LateGradient::never);
  if (options.probe && options.probe->wants_logits())
    options.probe->on_logits(local(linear(x, weight)).detach());
  HeadOutput out;
  out.cross_entropy = loss_of(x, weight, batch.labels_BL, batch, tokens);
  if (!mtp_.empty()) predict_further<Sp>(read, weight, batch, tokens, options, out);
  return out;
}

template <bool Sp>
void Stage::predict_further(nn::Stream<Sp> read_BLD, const HeadWeight& weight,
                            const MicroBatch& batch, const nn::Tokens& tokens,
                            const ForwardOptions& options, HeadOutput& out) {
  RECORD_USER_SCOPE("multi-token prediction");
  MOESH_CHECK(batch.ahead.size() == mtp_.size(), ErrorKind::config,
              "a micro-batch with tokens for ", batch.ahead.size(),
              " depths of multi-token prediction, and the model has ", mtp_.size());
  const bool is_evaluation = options.pass == nn::Pass::evaluation;
  Tensor<Dense{Place::T, Place::R, Place::R}> chosen_BL1;  // by the model itself
  if (is_evaluation)
    chosen_BL1 = whole_sequence(choices(to_head<Sp>(read_BLD, tokens), weight), tokens);
  std::int64_t moe_layer = first_moe_layer_;
  for (const auto& block : blocks_) moe_layer += block->is_moe();
  const auto depths = static_cast<double>(mtp_.size());
  BlockRun run;
  for (std::size_t k = 0; k < mtp_.size(); ++k) {
    MtpLayer& layer = *mtp_[k];
    const MicroBatch::MtpInput& ahead = batch.ahead[k];
    if (options.reshard)
      prefetch(layer.block().stored());
    else
      keep_gathered(layer.block().stored());
    const nn::Tokens counted(current_mesh(), tokens.batch(), tokens.sequence(), Sp,
                             options.sequence_cut, ahead.valid_BL(), batch.documents);
    const nn::Stream<Sp> x =
        layer.join<Sp>(embedded<Sp>(ahead.input_ids_BL, tokens), read_BLD, tokens);
    run.before = std::exchange(run.block, &layer.block());
    const auto [y, auxiliary, counts_E] = run_block<Sp>(run, x, batch, counted, options, moe_layer);
    read_BLD = nn::norm<Sp>(layer.norm(), y);
    const nn::Full to_words = to_head<Sp>(read_BLD, tokens);
    const nn::TokenSum loss = loss_of(to_words, weight, ahead.labels_BL, batch, tokens);
    out.auxiliary = sum_of_defined(out.auxiliary, auxiliary);
    if (layer.block().is_moe()) out.counts_E.push_back(counts_E), ++moe_layer;
    if (!is_evaluation) {
      const nn::TokenSum none = sum_all(narrow(stack(std::vector{detach(loss)}), 0, 0, 0));
      out.auxiliary = sum_of_defined(
          out.auxiliary, stack(std::vector<nn::TokenSum>{
                             none, none, scale(loss, options.auxiliary.mtp_weight / depths)}));
      continue;
    }
    // The model comes to this token k + 1 positions later.
    const auto later = own_span(
        map_rows([n = k + 1](const at::Tensor& t) { return moved_back(t, n); }, chosen_BL1),
        tokens);
    const at::Tensor valid = tokens.my_span(ahead.valid_BL()).unsqueeze(2);
    const auto is_accepted = map_rows(
        [&](const at::Tensor& mine, const at::Tensor& theirs) {
          return mine.eq(theirs).logical_and(valid).to(at::kLong);
        },
        choices(to_words, weight), later);
    out.predicted.push_back({loss, once<tp>(sum_all(is_accepted))});
  }
}

template <bool Sp>
Tensor<Dense{Place::T, Place::R, Place::R}> Stage::last_logits(const nn::Stream<Sp>& x_BLD,
                                                               const nn::Tokens& tokens) const {
  MOESH_CHECK(norm_, "last_logits of a stage that does not end with the last block");
  const nn::Full x = to_head<Sp>(nn::norm<Sp>(*norm_, x_BLD), tokens);
  const auto last = select(whole_sequence(x, tokens), 1, tokens.sequence() - 1);
  const auto logits = linear(last, head_weight(raw::LateGradient::may_be));
  const Pieces words{config_.vocab, current_mesh().size(tp)};
  return all_gather<tp>(logits, {.dim = 1, .sizes = words.lengths()});
}

void Stage::each_param(const std::function<void(Stored&)>& f) {
  if (has_own_embedding_) f(embedding_->weight().stored());
  for (auto& b : blocks_) b->each_param(f);
  if (norm_) norm_->each_param([&](auto& w) { f(w.stored()); });
  if (head_) f(head_->stored());
  for (auto& layer : mtp_) layer->each_param(f);
}

std::vector<nn::Attention*> Stage::attentions() {
  std::vector<nn::Attention*> all;
  for (const auto& b : blocks_) all.push_back(&b->attention());
  for (const auto& layer : mtp_) all.push_back(&layer->block().attention());
  return all;
}

std::vector<nn::Router*> Stage::routers() {
  std::vector<nn::Router*> all;
  for (auto& b : blocks_)
    if (b->is_moe()) all.push_back(&b->router());
  for (auto& layer : mtp_)
    if (layer->block().is_moe()) all.push_back(&layer->block().router());
  return all;
}

double Stage::flops_per_token(std::int64_t sequence) const {
  // An embedding that is not the head as well is looked up: no FLOP.
  const bool is_looked_up = has_own_embedding_ && (head_ || !norm_);
  const std::int64_t looked_up = is_looked_up ? config_.vocab * config_.dim : 0;
  const bool is_lookup_frozen = is_looked_up && !embedding_->weight().stored().spec.trained;
  const std::int64_t frozen = num_frozen_active_ - (is_lookup_frozen ? looked_up : 0);
  // Two FLOPs for each weight in forward, two for the gradient of its input, and two for its own.
  double sum =
      6.0 * static_cast<double>(num_active_ - looked_up) - 2.0 * static_cast<double>(frozen);
  for (const auto& b : blocks_) sum += b->attention().flops(sequence);
  // The head is used once more by each.
  const auto head = static_cast<double>(config_.vocab * config_.dim);
  for (const auto& layer : mtp_)
    sum += layer->block().attention().flops(sequence) + (is_head_trained() ? 6 : 4) * head;
  return sum;
}

template nn::Stream<true> Stage::embed<true>(const MicroBatch&, const nn::Tokens&,
                                             const ForwardOptions&) const;
template nn::Stream<false> Stage::embed<false>(const MicroBatch&, const nn::Tokens&,
                                               const ForwardOptions&) const;
template StageOutput<true> Stage::run_blocks<true>(const nn::Stream<true>&, const MicroBatch&,
                                                   const nn::Tokens&, const ForwardOptions&);
template StageOutput<false> Stage::run_blocks<false>(const nn::Stream<false>&, const MicroBatch&,
                                                     const nn::Tokens&, const ForwardOptions&);
template HeadOutput Stage::head<true>(const nn::Stream<true>&, const MicroBatch&, const nn::Tokens&,
                                      const ForwardOptions&);
template HeadOutput Stage::head<false>(const nn::Stream<false>&, const MicroBatch&,
                                       const nn::Tokens&, const ForwardOptions&);
template Tensor<Dense{Place::T, Place::R, Place::R}> Stage::last_logits<true>(
    const nn::Stream<true>&, const nn::Tokens&) const;
template Tensor<Dense{Place::T, Place::R, Place::R}> Stage::last_logits<false>(
    const nn::Stream<false>&, const nn::Tokens&) const;

}  // namespace moesh::models
