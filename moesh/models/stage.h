#pragma once
// A stage of a decoder: some of its blocks, with the embedding before the first and the head after
// the last. What goes from stage to stage is the residual stream; losses and counts stay where they
// arise. The whole decoder is one stage.

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "moesh/fsdp/reshard.h"
#include "moesh/models/decoder.h"
#include "moesh/nn/experts.h"
#include "moesh/nn/linear.h"
#include "moesh/nn/norm.h"
#include "moesh/nn/vocabulary.h"

namespace moesh::models {

// One block of a decoder: attention and an MLP or a mixture of experts, each behind a norm and
// added to the residual stream.

/// A block's output: the stream, its kNumAuxiliary auxiliary losses (undefined if it has none), and
/// what its router counted (undefined without a router).
template <bool Sp>
using BlockOutput = std::tuple<nn::Stream<Sp>, nn::TokenSum, nn::TokenSum>;

/// a + b; each may be undefined, which is nothing to add.
nn::TokenSum sum_of_defined(const nn::TokenSum& a, const nn::TokenSum& b);

class Block {
 public:
  Block(const DecoderPlan& plan, std::int64_t layer, const ModelOptions& options,
        const nn::ModuleOptions& module);

  /// `moe_layer` is the number of this block among those that are mixtures.
  template <bool Sp>
  BlockOutput<Sp> run(const nn::Stream<Sp>& x_BLD, const nn::Tokens& tokens,
                      const MicroBatch& batch, const ForwardOptions& options,
                      std::int64_t moe_layer);

  bool is_moe() const { return moe_.has_value(); }
  nn::Router& router() { return moe_->router(); }
  const nn::Attention& attention() const { return *attention_; }
  nn::Attention& attention() { return *attention_; }
  /// Every parameter, in forward order.
  void each_param(const std::function<void(Stored&)>& f);
  std::vector<const Stored*> stored();
  /// Whether some of its parameters are.
  bool is_trained();

 private:
  std::int64_t layer_;
  double residual_scale_;
  nn::RmsNorm attention_norm_, ffn_norm_;
  std::unique_ptr<nn::Attention> attention_;
  std::optional<nn::Mlp> mlp_;
  std::optional<nn::Moe> moe_;
};

// Multi-token prediction (DeepSeek-V3, section 2.2): layer k, counted from 1, predicts token i + k
// + 1 from the input of the head at position i in layer k - 1 (in the model itself for k = 1), and
// from the embedding of token i + k. Embedding and head are the model's. In files it is a block
// after the last one, with a few more weights. B batch, L tokens of this cp rank, D model

class MtpLayer {
 public:
  /// `layer` is the number of its block: the first one follows the last of the model.
  MtpLayer(const DecoderPlan& plan, std::int64_t layer, const ModelOptions& options,
           const nn::ModuleOptions& module);

  /// The input of its block, from the embedding of the tokens ahead and what the head has read
  /// before.
  template <bool Sp>
  nn::Stream<Sp> join(const nn::Stream<Sp>& ahead_BLD, const nn::Stream<Sp>& read_BLD,
                      const nn::Tokens& tokens) const;
  Block& block() { return block_; }
  const Block& block() const { return block_; }
  /// Between the block and the head.
  const nn::RmsNorm& norm() const { return norm_; }
  void each_param(const std::function<void(Stored&)>& f);

 private:
  nn::RmsNorm ahead_norm_, read_norm_, norm_;
  nn::UncutWeight join_;
  Block block_;
};

/// The results of the blocks of a stage.
template <bool Sp>
struct StageOutput {
  nn::Stream<Sp> x_BLD;                // to the next stage, or to the head
  nn::TokenSum auxiliary;              // kNumAuxiliary losses; undefined if there are none
  std::vector<nn::TokenSum> counts_E;  // of each MoE layer, not yet summed over the ranks
};

class Stage {
 public:
  /// On the current mesh. Where the last stage needs the embedding, and the first stage is on this
  /// rank as well, that is `first`, and its parameter is this one's.
  Stage(const DecoderPlan& plan, const ModelOptions& options, LayerRange blocks,
        const Stage* first = nullptr);

  /// How the tokens of a micro-batch lie on the ranks.
  nn::Tokens tokens_of(const MicroBatch& batch, const ForwardOptions& options) const;
  /// The first stage: token ids -> stream.
  template <bool Sp>
  nn::Stream<Sp> embed(const MicroBatch& batch, const nn::Tokens& tokens,
                       const ForwardOptions& options) const;
  template <bool Sp>
  StageOutput<Sp> run_blocks(const nn::Stream<Sp>& x_BLD, const MicroBatch& batch,
                             const nn::Tokens& tokens, const ForwardOptions& options);
  /// The last stage: stream -> what it adds behind its blocks: losses of this rank's tokens,
  /// divided by the tokens of the step, and what the MTP layers count and predict.
  template <bool Sp>
  ForwardResult head(const nn::Stream<Sp>& x_BLD, const MicroBatch& batch, const nn::Tokens& tokens,
                     const ForwardOptions& options);

  /// The last stage: stream -> logits [B, V] of the last position, whole on cp and tp.
  template <bool Sp>
  Tensor<Dense{Place::T, Place::R, Place::R}> last_logits(const nn::Stream<Sp>& x_BLD,
                                                          const nn::Tokens& tokens) const;

  bool is_first() const { return is_first_; }
  bool is_last() const { return norm_.has_value(); }
  /// Every parameter once, in forward order, but the one of another stage of this rank.
  void each_param(const std::function<void(Stored&)>& f);
  /// Null in a stage that has none.
  nn::Embedding* embedding() { return embedding_.get(); }
  /// The router of each MoE layer, and the number of the first one in the model.
  std::vector<nn::Router*> routers();
  std::int64_t first_moe_layer() const { return first_moe_layer_; }
  /// One for each layer.
  std::vector<nn::Attention*> attentions();
  /// Parameters of all ranks of this stage, and those that one token meets.
  std::int64_t num_parameters() const { return num_parameters_; }
  std::int64_t num_active_parameters() const { return num_active_; }
  /// FLOPs of forward and backward, at this sequence length.
  double flops_per_token(std::int64_t sequence) const;

 private:
  // A block, and what backward comes to after it.
  struct BlockRun {
    Block *block = nullptr, *before = nullptr;
    std::shared_ptr<raw::Gathers> gathers_before = nullptr;
  };
  template <bool Sp>
  BlockOutput<Sp> run_block(BlockRun& run, const nn::Stream<Sp>& x, const MicroBatch& batch,
                            const nn::Tokens& tokens, const ForwardOptions& options,
                            std::int64_t moe_layer);

  template <bool Sp>
  nn::Stream<Sp> embedded(const at::Tensor& ids_BL, const nn::Tokens& tokens) const;
  /// The input of the head: all tokens of this cp rank, of a stream that is normalised.
  template <bool Sp>
  nn::Full to_head(const nn::Stream<Sp>& normed_BLD, const nn::Tokens& tokens) const;
  using HeadWeight = Tensor<Dense{Place::R, Place::R, Place::F}>;
  HeadWeight head_weight(raw::LateGradient late) const;
  bool is_head_trained() const;
  /// Cross-entropy of this rank's tokens, divided by those of the step.
  nn::TokenSum loss_of(const nn::Full& x_BLD, const HeadWeight& weight, const at::Tensor& labels_BL,
                       const MicroBatch& batch, const nn::Tokens& tokens) const;
  /// The words [B, L, 1] with the largest logits.
  nn::OfSpan choices(const nn::Full& x_BLD, const HeadWeight& weight) const;
  /// Adds what the MTP layers give. `read_BLD` is what the head has read, normalised.
  template <bool Sp>
  void predict_further(nn::Stream<Sp> read_BLD, const HeadWeight& weight, const MicroBatch& batch,
                       const nn::Tokens& tokens, const ForwardOptions& options, ForwardResult& out);

  DecoderConfig config_;
  double embedding_scale_, logits_scale_;
  std::int64_t first_moe_layer_ = 0;  // MoE layers of the stages before this one
  bool is_first_ = false, has_own_embedding_ = false;
  std::shared_ptr<nn::Embedding> embedding_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::optional<nn::RmsNorm> norm_;             // of the last stage, before the head
  std::optional<nn::Cut> head_;                 // none, in the last stage: the embedding
  std::vector<std::unique_ptr<MtpLayer>> mtp_;  // of the last stage
  std::int64_t num_parameters_ = 0, num_active_ = 0, num_frozen_active_ = 0;
};

}  // namespace moesh::models
