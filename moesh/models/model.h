#pragma once
// A model as the trainer sees it: one decoder, of which every model is a plan (decoder.h).

#include <ATen/ops/ones.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "moesh/base/label.h"
#include "moesh/fsdp/param.h"
#include "moesh/kernels/float8.h"
#include "moesh/kernels/gpu_kernels.h"
#include "moesh/kernels/quantized.h"
#include "moesh/nn/attention.h"
#include "moesh/nn/dispatch.h"
#include "moesh/nn/kv_cache.h"
#include "moesh/nn/lora.h"
#include "moesh/nn/residual.h"
#include "moesh/nn/router.h"
#include "moesh/nn/tokens.h"

namespace moesh::models {

/// Weights of the auxiliary losses.
struct Auxiliary {
  double balance_weight = 0, z_weight = 0;
  nn::BalanceOver balance_over = nn::BalanceOver::sequence;
  double mtp_weight = 0;  // of the mean over the depths of multi-token prediction
  bool of_routers() const { return balance_weight != 0 || z_weight != 0; }
  bool any() const { return of_routers() || mtp_weight != 0; }
};
/// The auxiliary losses by themselves: balance, size of the logits, multi-token prediction.
constexpr std::int64_t kNumAuxiliary = 3;

/// One micro-batch: this dp rank's sequences, whole; the model cuts them.
struct MicroBatch {
  at::Tensor input_ids_BL, labels_BL;  // int64; kIgnoredLabel: none
  // Valid tokens of the whole optimizer step, of all ranks and micro-batches: a float64 scalar, of
  // the device or of the host.
  at::Tensor num_step_tokens = at::ones({}, at::kDouble);
  std::int64_t index = 0;        // of the micro-batch in its step
  nn::Documents documents = {};  // none: every sequence is one
  // Input token and label of each depth of multi-token prediction at a position.
  struct MtpInput {
    at::Tensor input_ids_BL, labels_BL;
    at::Tensor valid_BL() const { return labels_BL.ne(kIgnoredLabel); }
  };
  std::vector<MtpInput> ahead = {};
  // The numbers of its sequences in the run, int64 [B], where something depends on them (dropout).
  at::Tensor samples_B = {};

  /// bool: the tokens that count, those with a label.
  at::Tensor valid_BL() const { return labels_BL.ne(kIgnoredLabel); }
  /// The tensors that come from the data, to be copied.
  std::vector<at::Tensor*> from_data() {
    std::vector<at::Tensor*> all{&input_ids_BL, &labels_BL};
    if (documents.any()) all.push_back(&documents.starts_BL);
    for (MtpInput& a : ahead) all.push_back(&a.input_ids_BL), all.push_back(&a.labels_BL);
    if (samples_B.defined()) all.push_back(&samples_B);
    return all;
  }
};

/// The part of a block that backward computes again, because forward has not kept it.
enum class Recompute {
  none,
  selective,  // all but what is expensive: results of attention, pre-activations of MLPs and
              // experts
  full,       // all but the input of the block
};

struct ForwardOptions {
  bool sequence_parallel = true;
  SequenceCut sequence_cut = SequenceCut::contiguous;  // over cp
  Recompute recompute = Recompute::none;
  nn::Pass pass = nn::Pass::training;
  Auxiliary auxiliary;
  // Free gathered parameters after a block's forward, and gather them again in backward.
  bool reshard = false;
  // The graph of the head begins at a leaf of its own, ForwardResult::head_input, so that its
  // backward can be run by itself, before that of the blocks.
  bool head_apart = false;
  nn::Probe* probe = nullptr;  // null: none
  // Every attention sees its largest logits of training passes (nn::MaxLogits), for QK-clip.
  bool watches_logits = false;
  // The cache of earlier tokens, to which these are added; null: these are all tokens.
  nn::ModelKvCache* kv_cache = nullptr;
};

/// The residual stream between two stages, as this rank has it: with and without sequence
/// parallelism.
using StageStream = std::variant<nn::Stream<true>, nn::Stream<false>>;

/// The results of a model, or of a stage of it.
struct ForwardResult {
  // Cross-entropy and auxiliary losses, each divided by the tokens of the step; undefined in a
  // stage that has neither.
  nn::TokenSum loss;
  // The same in two parts: what the blocks give, which is undefined where they give none, and what
  // the last stage adds behind them.
  nn::TokenSum blocks_loss, head_loss;
  // The parts of it, for the log. `auxiliary` has kNumAuxiliary terms, each with its weight in it;
  // it is undefined where all weights are 0. Cross-entropy is that of the last stage.
  nn::TokenSum cross_entropy, auxiliary;
  std::vector<nn::TokenSum> counts_E;  // of each MoE layer, int64
  std::int64_t first_moe_layer = 0;    // of these, its number in the model
  // For the stage after this one; in the last undefined, or for the head where that is apart.
  StageStream stream = {};
  StageStream head_input = {};  // of the head, where it is apart: its value, with a gradient
  /// The results of a depth of multi-token prediction in the last stage, in an evaluation:
  /// cross-entropy, divided by the tokens of the step, and how many tokens it predicts as the model
  /// itself does when it comes to them (int64).
  struct Predicted {
    nn::TokenSum cross_entropy, num_accepted;
  };
  std::vector<Predicted> predicted = {};
};

/// The layers [begin, end).
struct LayerRange {
  std::int64_t begin, end;
};

/// How a model is made, whatever it is.
struct ModelOptions {
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;  // meta: only shapes, for counting
  std::uint64_t seed = 0;
  nn::Dispatcher dispatcher = nn::Dispatcher::automatic;
  bool forced_balance = false;
  // Scores multiply what goes into an expert, or what comes out of it; nothing: the model's own
  // way.
  std::optional<bool> score_before_experts = {};
  kernels::GpuKernels gpu_kernels = kernels::GpuKernels::automatic;
  bool weight_copies = false;  // in the type of the work, beside the master weights
  nn::LoraOf lora = nn::no_lora;
  kernels::Float8 float8 = {};
  // By the name of a parameter: whether it is not trained. None: all are.
  std::function<bool(const std::string& name)> is_frozen = {};
  // How those of them rest that rest quantized. None: all rest in the type of the work.
  std::function<std::optional<kernels::Quantization>(const std::string& name)> quantization = {};
  // The stages of a pipeline that this rank has, in the order of the layers; none: the whole model,
  // in one.
  std::vector<LayerRange> stages = {};
};

struct DecoderPlan;
class Stage;

/// A model, or the stages of it that this rank has: parameters and routers are those.
class Model {
 public:
  /// On the current mesh.
  Model(const DecoderPlan& plan, const ModelOptions& options);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  /// Forward of a model in one stage.
  ForwardResult forward(const MicroBatch& batch, const ForwardOptions& options);
  /// Forward of one of this rank's stages, from what the stage before it gave; the first stage of
  /// the model takes nothing.
  ForwardResult forward_stage(std::size_t stage, const StageStream& input, const MicroBatch& batch,
                              const ForwardOptions& options);
  /// Sizes of this rank's part of the stream between stages, and its type.
  std::vector<std::int64_t> stream_sizes(const MicroBatch& batch,
                                         const ForwardOptions& options) const;
  at::TensorOptions stream_options() const;
  /// The logits [B, V] of the token that follows ids [B, L], and those which `kv_cache` has kept
  /// before them (begin with an empty one); the same on every cp and tp rank. Without gradients. Of
  /// a model in one stage.
  at::Tensor next_logits(const at::Tensor& ids_BL, nn::ModelKvCache& kv_cache,
                         const ForwardOptions& options);
  /// Every parameter once, in forward order. `decays` is false for norms, biases and sinks.
  void each_param(const std::function<void(Stored& w, bool decays)>& f);
  /// The parameter that both ends of the pipeline have, each on its own rank, and whose gradients
  /// are one: the embedding, where it is the head or predicts further tokens. Null where this rank
  /// has no such end, or both.
  Stored* tied_to_other_end();
  bool has_tied_ends() const;
  std::vector<nn::Router*> routers();
  std::vector<nn::Attention*> attentions();
  /// The numbers of the routers among the MoE layers of the whole model, and how many those are.
  std::vector<std::int64_t> router_numbers() const;
  std::int64_t num_moe_layers() const { return num_moe_layers_; }
  std::int64_t num_experts() const;
  /// Forward and backward are called under UseGpuKernels of this.
  kernels::GpuKernels gpu_kernels() const { return options_.gpu_kernels; }
  /// Parameters of the whole model, and those that one token meets.
  std::int64_t num_parameters() const { return num_parameters_; }
  std::int64_t num_active_parameters() const { return num_active_; }
  /// FLOPs of forward and backward, at this sequence length: matrix products and attention scores.
  /// An embedding is looked up: no FLOP. They are those of the whole model.
  double flops_per_token(std::int64_t sequence) const;

 private:
  bool is_whole() const;
  void check_whole(const char* what) const;
  template <class F>
  void of_whole(F ask) const;

  std::unique_ptr<const DecoderPlan> plan_;
  ModelOptions options_;
  std::vector<std::unique_ptr<Stage>> stages_;  // one behind the other; usually one, all of it
  std::int64_t num_moe_layers_ = 0, num_parameters_ = 0, num_active_ = 0;  // of the whole model
};

}  // namespace moesh::models
