#pragma once
// Multi-token prediction (DeepSeek-V3, section 2.2): layer k, counted from 1, predicts token i + k
// + 1 from the input of the head at position i in layer k - 1 (in the model itself for k = 1), and
// from the embedding of token i + k. Embedding and head are the model's. In files it is a block
// after the last one, with a few more weights. B batch, L tokens of this cp rank, D model

#include <cstdint>
#include <functional>

#include "moesh/models/block.h"
#include "moesh/nn/linear.h"
#include "moesh/nn/norm.h"

namespace moesh::models {

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
