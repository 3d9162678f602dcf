#pragma once
// The decoder of all models: embedding, blocks of attention and MLP or MoE on a residual
// stream, norm, head, loss. A model is a plan of it: formulas, sizes and names.

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "moesh/models/config.h"
#include "moesh/models/model.h"
#include "moesh/nn/attention.h"
#include "moesh/nn/linear.h"
#include "moesh/nn/moe.h"

namespace moesh::models {

struct DecoderPlan {
  DecoderConfig config;
  /// The attention of a layer, or what stands in its place; `name` is what its parameters' names
  /// begin with.
  std::function<std::unique_ptr<nn::Attention>(std::int64_t layer, const std::string& name,
                                               const nn::ModuleOptions& options)>
      attention;
  std::function<std::string(std::int64_t layer)> attention_name = [](std::int64_t) {
    return "self_attn";
  };
  /// Whether a layer is a mixture of experts; else it is a dense MLP of width `ffn`.
  std::function<bool(std::int64_t layer)> is_moe = [](std::int64_t) { return true; };
  /// Router and experts: what a model adds to the sizes that its configuration has.
  nn::MoeConfig moe;
  std::int64_t ffn = 0;
  // Layers of multi-token prediction: the blocks behind the last (MtpLayer).
  std::int64_t num_mtp_layers = 0;
  std::string mlp_name = "mlp";                                   // of both, in a layer
  std::string expert_bias_name = "gate.e_score_correction_bias";  // after that, in files
  nn::NormWeight norm_weight = nn::NormWeight::plain;             // of the norms on the stream
  // Factors on the embedding, on what attention and MLP add to the stream, and on the logits.
  double embedding_scale = 1, residual_scale = 1, logits_scale = 1;
  /// How a weight is quantized in the files that the model is published in. None: they have none
  /// that is.
  std::function<std::optional<kernels::Quantization>(const Stored& w)> published = {};
};

}  // namespace moesh::models
