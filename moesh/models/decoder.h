#pragma once
// The decoder of all models: embedding, blocks of attention and MLP or MoE on a residual
// stream, norm, head, loss. A model is a plan of it: formulas, sizes and names.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moesh/formats/disk.h"
#include "moesh/models/config.h"
#include "moesh/models/model.h"
#include "moesh/nn/attention.h"
#include "moesh/nn/linear.h"
#include "moesh/nn/moe.h"

namespace moesh::models {

/// The experts of a layer: parameters name.w1 and name.w3 [E, F, D], name.w2 [E, D, F], with biases
/// name.b1 and so on.
struct LayerExperts {
  std::string name;
  std::int64_t E, F, D;
};
/// A tensor for each expert and part: name.3.gate_proj.weight [F, D], and likewise up and down,
/// under the model's names.
std::vector<formats::DiskTensor> one_by_one(const LayerExperts& experts, const std::string& gate,
                                            const std::string& up, const std::string& down);
/// name.gate_up_proj [E, 2F, D], gate rows first, and name.down_proj [E, D, F].
std::vector<formats::DiskTensor> stacked_out_in(const LayerExperts& experts);
/// name.gate_up_proj [E, D, 2F], gate half first or interleaved, and name.down_proj [E, F, D].
std::vector<formats::DiskTensor> stacked_in_out(const LayerExperts& experts, bool interleaved);

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
  /// The tensors in files of a layer's experts. Most models have both layouts under these names.
  std::function<std::vector<formats::DiskTensor>(const LayerExperts&, formats::ExpertLayout)>
      experts_on_disk = [](const LayerExperts& experts, formats::ExpertLayout layout) {
        return layout == formats::ExpertLayout::per_expert
                   ? one_by_one(experts, "gate_proj", "up_proj", "down_proj")
                   : stacked_out_in(experts);
      };
  /// How a weight is quantized in the files that the model is published in. None: they have none
  /// that is.
  std::function<std::optional<kernels::Quantization>(const Stored& w)> published = {};
};

/// A plan with grouped-query attention in every layer. `change`, if given, sets what that of a
/// layer has besides the sizes of `config`.
DecoderPlan grouped_plan(
    const GroupedDecoderConfig& config,
    const std::function<void(nn::GroupedAttentionConfig& c, std::int64_t layer)>& change = {});

}  // namespace moesh::models
