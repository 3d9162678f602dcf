#pragma once
// Grouped-query attention with what its models add: q and k norms, rotation or none, windows,
// chunks, sinks, biases. Heads are cut over tp, keys and values as the queries.

#include <optional>
#include <string>

#include "moesh/nn/attention.h"
#include "moesh/nn/linear.h"
#include "moesh/nn/norm.h"
#include "moesh/nn/rope.h"

namespace moesh::nn {

enum class QkNorm {
  none,
  weighted,  // RMSNorm of each head with a weight, before the rotation (Qwen3)
  plain,     // the same without a weight, after the rotation (Llama 4)
  across,    // RMSNorm of all heads together with a weight, before the rotation (OLMoE)
};

struct GroupedAttentionConfig {
  std::int64_t dim = 0, num_heads = 0, num_kv_heads = 0, head_dim = 0;
  bool biases = false, output_bias = false;  // of q, k and v; of o
  QkNorm qk_norm = QkNorm::none;
  double norm_eps = 1e-6;
  NormWeight norm_weight = NormWeight::plain;  // of `weighted` norms
  // Rotation of the first features of a head, or of all; none: no positions (NoPE).
  std::optional<RopeConfig> rope = {};
  std::optional<double> scale = {};    // of the scores; if not given 1 / sqrt(head_dim)
  std::int64_t window = 0, chunk = 0;  // as in AttentionOptions
  double clip = 0;  // q, k and v, before the rotation, are cut off at +-clip; 0: they are not
  bool sinks = false;
  // q_proj gives d features more for each head, after its query: y is multiplied by their sigmoid.
  bool output_gate = false;
  // Queries grow with their position: times 1 + growth * log1p(floor((position + 1) /
  // growth_floor)).
  double growth = 0;
  std::int64_t growth_floor = 8192;

  /// On the current mesh.
  void validate() const;
};

class GroupedAttention final : public Attention {
 public:
  GroupedAttention(const GroupedAttentionConfig& config, const std::string& name,
                   const ModuleOptions& o);

  Sum operator()(const Full& x_BLD, const Tokens& tokens, KvCache* kv_cache = nullptr,
                 MaxLogits* logits = nullptr) const override;
  /// Half of it in queries, half in keys; all of it in queries where several heads share a key.
  std::vector<LogitRows> logit_rows() override;
  void each_param(const std::function<void(Stored&)>& f) override;
  double flops(std::int64_t sequence) const override;
  std::optional<AttentionOptions> sees() const override { return options_; }

 private:
  GroupedAttentionConfig config_;
  AttentionOptions options_;
  std::shared_ptr<RopeTables> rope_tables_;
  ColumnWeight q_, k_, v_;
  RowWeight o_;
  std::optional<RmsNorm> q_norm_, k_norm_;
  std::optional<SplitRmsNorm> q_across_, k_across_;
  std::optional<Cut> sinks_;
};

}  // namespace moesh::nn
