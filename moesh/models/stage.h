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

/// What the blocks of a stage give.
template <bool Sp>
struct StageOutput {
  nn::Stream<Sp> x_BLD;                // to the next stage, or to the head
  nn::TokenSum auxiliary;              // kNumAuxiliary losses; undefined if there are none
  std::vector<nn::TokenSum> counts_E;  // of each MoE layer, not yet summed over the ranks
};

class Stage {
 public:
  /// On the current mesh. Where the head is the embedding, and the first stage is on this rank as
  /// well, that is `first`, and its parameter is this one's.
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
  /// The last stage: stream -> cross-entropy of this rank's tokens, divided by those of the step.
  template <bool Sp>
  nn::TokenSum head(const nn::Stream<Sp>& x_BLD, const MicroBatch& batch, const nn::Tokens& tokens,
                    const ForwardOptions& options) const;

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
  /// Of each layer.
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

  /// To the head: normalised, all tokens of this cp rank.
  template <bool Sp>
  nn::Full to_head(const nn::Stream<Sp>& x_BLD, const nn::Tokens& tokens) const;

  DecoderConfig config_;
  double embedding_scale_, logits_scale_;
  std::int64_t first_moe_layer_ = 0;  // MoE layers of the stages before this one
  bool is_first_ = false, has_own_embedding_ = false;
  std::shared_ptr<nn::Embedding> embedding_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::optional<nn::RmsNorm> norm_;  // of the last stage, before the head
  std::optional<nn::Cut> head_;      // none, in the last stage: the embedding
  std::int64_t num_parameters_ = 0, num_active_ = 0, num_frozen_active_ = 0;
};

}  // namespace moesh::models
