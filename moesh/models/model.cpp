#include "moesh/models/model.h"

#include <ATen/core/grad_mode.h>

#include "moesh/base/error.h"
#include "moesh/fsdp/param.h"
#include "moesh/models/decoder.h"
#include "moesh/models/stage.h"
#include "moesh/spmd/backward.h"

namespace moesh::models {
namespace {

// Matrices decay, each expert's own too; norms, biases and sinks do not.
bool decays(const Stored& w) {
  const bool is_expert = w.storage == efsdp;
  return w.spec.shape.size() > (is_expert ? 2u : 1u);
}

template <bool Sp>
ForwardResult run(Stage& stage, const StageStream& input, const MicroBatch& batch,
                  const ForwardOptions& options) {
  const nn::Tokens tokens = stage.tokens_of(batch, options);
  const auto x =
      stage.is_first() ? stage.embed<Sp>(batch, tokens, options) : std::get<nn::Stream<Sp>>(input);
  const auto out = stage.run_blocks<Sp>(x, batch, tokens, options);
  ForwardResult result{.loss = {},
                       .blocks_loss = {},
                       .head_loss = {},
                       .cross_entropy = {},
                       .auxiliary = out.auxiliary,
                       .counts_E = out.counts_E,
                       .first_moe_layer = stage.first_moe_layer()};
  if (local(out.auxiliary).defined()) result.blocks_loss = sum_all(out.auxiliary);
  result.loss = result.blocks_loss;
  if (!stage.is_last()) {
    result.stream = out.x_BLD;
    return result;
  }
  const auto to_head = options.head_apart ? as_input(out.x_BLD) : out.x_BLD;
  if (options.head_apart) result.stream = out.x_BLD, result.head_input = to_head;
  ForwardResult head = stage.head<Sp>(to_head, batch, tokens, options);
  result.cross_entropy = head.cross_entropy, result.head_loss = head.cross_entropy;
  if (local(head.auxiliary).defined())
    result.head_loss = result.head_loss + sum_all(head.auxiliary);
  result.loss = sum_of_defined(result.head_loss, result.blocks_loss);
  result.auxiliary = sum_of_defined(result.auxiliary, head.auxiliary);
  result.counts_E.insert(result.counts_E.end(), head.counts_E.begin(), head.counts_E.end());
  result.predicted = std::move(head.predicted);
  return result;
}

template <bool Sp>
at::Tensor run_next(Stage& stage, const at::Tensor& ids_BL, const ForwardOptions& options) {
  const MicroBatch batch{.input_ids_BL = ids_BL, .labels_BL = ids_BL};
  const nn::Tokens tokens = stage.tokens_of(batch, options);
  const auto x = stage.embed<Sp>(batch, tokens, options);
  const auto out = stage.run_blocks<Sp>(x, batch, tokens, options);
  options.kv_cache->num_tokens += ids_BL.size(1);
  return local(stage.last_logits<Sp>(out.x_BLD, tokens));
}

}  // namespace

bool Model::is_whole() const {
  return stages_.size() == 1 && stages_[0]->is_first() && stages_[0]->is_last();
}

// Questions about the whole model do not depend on this rank's part of it. Its shapes are
// not kept: an estimate would count them.
template <class F>
void Model::of_whole(F ask) const {
  if (is_whole()) return ask(*stages_[0]);
  const OneRankScope scope;
  ModelOptions shapes = options_;
  shapes.device = at::kMeta;
  ask(Stage(*plan_, shapes, LayerRange{0, plan_->config.num_layers}));
}

void Model::check_whole(const char* what) const {
  MOESH_CHECK(is_whole(), ErrorKind::config, what,
              " needs the whole model, and this rank has only some of the layers: pp is ",
              current_mesh().size(pp),
              "; set parallelism.pipeline_parallel_degree to 1, on whatever mesh it was trained");
}

Model::Model(const DecoderPlan& plan, const ModelOptions& options)
    : plan_(std::make_unique<DecoderPlan>(plan)), options_(options) {
  const std::int64_t num_layers = plan.config.num_layers;
  std::vector<LayerRange> ranges = options.stages;
  if (ranges.empty()) ranges.push_back({0, num_layers});
  for (const LayerRange& range : ranges) {
    const bool has_first = !stages_.empty() && stages_[0]->is_first();
    stages_.push_back(
        std::make_unique<Stage>(plan, options, range, has_first ? stages_[0].get() : nullptr));
  }
  of_whole([&](const Stage& whole) {
    num_parameters_ = whole.num_parameters(), num_active_ = whole.num_active_parameters();
  });
  for (std::int64_t i = 0; i < num_layers + plan.num_mtp_layers; ++i)
    num_moe_layers_ += plan.is_moe(i);
  const kernels::UseGpuKernels chosen(options.gpu_kernels);
  if (options.weight_copies) each_param([](Stored& w, bool) { raw::keep_copy(w); });
}

Model::~Model() = default;

ForwardResult Model::forward(const MicroBatch& batch, const ForwardOptions& options) {
  check_whole("forward");
  return forward_stage(0, {}, batch, options);
}

ForwardResult Model::forward_stage(std::size_t stage, const StageStream& input,
                                   const MicroBatch& batch, const ForwardOptions& options) {
  return options.sequence_parallel ? run<true>(*stages_.at(stage), input, batch, options)
                                   : run<false>(*stages_.at(stage), input, batch, options);
}

std::vector<std::int64_t> Model::stream_sizes(const MicroBatch& batch,
                                              const ForwardOptions& options) const {
  const auto& ids = batch.input_ids_BL;
  const nn::Tokens tokens(current_mesh(), ids.size(0), ids.size(1), options.sequence_parallel,
                          options.sequence_cut);
  return {tokens.batch(), tokens.length(), plan_->config.dim};
}

at::TensorOptions Model::stream_options() const {
  return at::TensorOptions(options_.device).dtype(options_.dtype);
}

at::Tensor Model::next_logits(const at::Tensor& ids_BL, nn::ModelKvCache& kv_cache,
                              const ForwardOptions& options) {
  check_whole("the next token");
  const at::NoGradGuard no_grad;
  ForwardOptions o = options;
  o.pass = nn::Pass::evaluation, o.recompute = Recompute::none, o.auxiliary = {},
  o.kv_cache = &kv_cache;
  kv_cache.layers.resize(static_cast<std::size_t>(plan_->config.num_layers));
  return o.sequence_parallel ? run_next<true>(*stages_[0], ids_BL, o)
                             : run_next<false>(*stages_[0], ids_BL, o);
}

void Model::each_param(const std::function<void(Stored&, bool)>& f) {
  for (auto& s : stages_) s->each_param([&](Stored& w) { f(w, decays(w)); });
}

Stored* Model::tied_to_other_end() {
  Stage &first = *stages_.front(), &last = *stages_.back();
  if (!has_tied_ends() || first.is_first() == last.is_last()) return nullptr;
  return &(first.is_first() ? first : last).embedding()->weight().stored();
}

bool Model::has_tied_ends() const {
  return plan_->config.tie_embeddings || plan_->num_mtp_layers > 0;
}

std::vector<nn::Router*> Model::routers() {
  std::vector<nn::Router*> all;
  for (auto& s : stages_)
    for (nn::Router* router : s->routers()) all.push_back(router);
  return all;
}

std::vector<nn::Attention*> Model::attentions() {
  std::vector<nn::Attention*> all;
  for (auto& s : stages_)
    for (nn::Attention* attention : s->attentions()) all.push_back(attention);
  return all;
}

std::vector<std::int64_t> Model::router_numbers() const {
  std::vector<std::int64_t> all;
  for (const auto& s : stages_)
    for (std::size_t i = 0; i < s->routers().size(); ++i)
      all.push_back(s->first_moe_layer() + static_cast<std::int64_t>(i));
  return all;
}

std::int64_t Model::num_experts() const { return plan_->config.num_experts; }

double Model::flops_per_token(std::int64_t sequence) const {
  double flops = 0;
  of_whole([&](const Stage& whole) { flops = whole.flops_per_token(sequence); });
  return flops;
}

}  // namespace moesh::models
