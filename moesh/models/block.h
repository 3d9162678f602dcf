#pragma once
// One block of a decoder: attention and an MLP or a mixture of experts, each behind a norm and
// added to the residual stream.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "moesh/models/decoder.h"
#include "moesh/nn/linear.h"
#include "moesh/nn/mlp.h"
#include "moesh/nn/norm.h"

namespace moesh::models {

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

}  // namespace moesh::models
