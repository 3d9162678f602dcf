#include "moesh/models/decoder.h"

#include <ATen/core/grad_mode.h>

#include "moesh/models/stage.h"

namespace moesh::models {
namespace {

// Matrices decay, each expert's own too; norms, biases and sinks do not.
bool decays(const Stored& w) {
  const bool is_expert = w.storage == efsdp;
  return w.spec.shape.size() > (is_expert ? 2u : 1u);
}

class Decoder final : public Model {
 public:
  Decoder(const DecoderPlan& plan, const ModelOptions& options)
      : num_layers_(plan.config.num_layers),
        stage_(plan, options, {0, plan.config.num_layers}),
        gpu_kernels_(options.gpu_kernels) {
    if (options.weight_copies) stage_.each_param([](Stored& w) { raw::keep_copy(w); });
  }

  ForwardResult forward(const MicroBatch& batch, const ForwardOptions& options) override {
    return options.sequence_parallel ? run<true>(batch, options) : run<false>(batch, options);
  }
  at::Tensor next_logits(const at::Tensor& ids_BL, nn::PastOfLayers& past,
                         const ForwardOptions& options) override {
    const at::NoGradGuard no_grad;
    ForwardOptions o = options;
    o.pass = nn::Pass::evaluation, o.recompute = Recompute::none, o.auxiliary = {}, o.past = &past;
    past.layers.resize(static_cast<std::size_t>(num_layers_));
    return o.sequence_parallel ? run_next<true>(ids_BL, o) : run_next<false>(ids_BL, o);
  }
  void each_param(const std::function<void(Stored&, bool)>& f) override {
    stage_.each_param([&](Stored& w) { f(w, decays(w)); });
  }
  std::vector<nn::Router*> routers() override { return stage_.routers(); }
  kernels::GpuKernels gpu_kernels() const override { return gpu_kernels_; }
  std::int64_t num_parameters() const override { return stage_.num_parameters(); }
  std::int64_t num_active_parameters() const override { return stage_.num_active_parameters(); }
  double flops_per_token(std::int64_t sequence) const override {
    return stage_.flops_per_token(sequence);
  }

 private:
  template <bool Sp>
  ForwardResult run(const MicroBatch& batch, const ForwardOptions& options) {
    const nn::Tokens tokens = stage_.tokens_of(batch, options);
    const auto x = stage_.embed<Sp>(batch, tokens, options);
    const auto out = stage_.run_blocks<Sp>(x, batch, tokens, options);
    const auto cross_entropy = stage_.head<Sp>(out.x_BLD, batch, tokens, options);
    return {.loss = local(out.auxiliary).defined() ? cross_entropy + sum_all(out.auxiliary)
                                                   : cross_entropy,
            .cross_entropy = cross_entropy,
            .auxiliary = out.auxiliary,
            .counts_E = out.counts_E};
  }

  template <bool Sp>
  at::Tensor run_next(const at::Tensor& ids_BL, const ForwardOptions& options) {
    const MicroBatch batch{.input_ids_BL = ids_BL, .labels_BL = ids_BL};
    const nn::Tokens tokens = stage_.tokens_of(batch, options);
    const auto x = stage_.embed<Sp>(batch, tokens, options);
    const auto out = stage_.run_blocks<Sp>(x, batch, tokens, options);
    options.past->num_tokens += ids_BL.size(1);
    return local(stage_.last_logits<Sp>(out.x_BLD, tokens));
  }

  std::int64_t num_layers_;
  Stage stage_;
  kernels::GpuKernels gpu_kernels_;
};

}  // namespace

std::unique_ptr<Model> make_decoder(const DecoderPlan& plan, const ModelOptions& options) {
  return std::make_unique<Decoder>(plan, options);
}

}  // namespace moesh::models
