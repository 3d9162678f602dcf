#pragma once
// Gated DeltaNet: instead of keys and values of all tokens, each head keeps a matrix, which every
// token corrects (kernels/attention.h). A short convolution comes before it, and a gated norm
// after it. Heads are cut over tp, value heads together with their key heads.

#include <string>

#include "moesh/nn/attention.h"
#include "moesh/nn/linear.h"
#include "moesh/nn/norm.h"

namespace moesh::nn {

struct DeltaNetConfig {
  std::int64_t dim = 0, num_key_heads = 0, num_value_heads = 0;
  std::int64_t key_dim = 0, value_dim = 0;  // of a head
  std::int64_t num_taps = 4;                // of the convolution
  double norm_eps = 1e-6;
  double most_decay = 16;  // exp(A_log) begins between 0.01 and this

  /// On the current mesh.
  void validate() const;
};

class DeltaNet final : public Attention {
 public:
  DeltaNet(const DeltaNetConfig& config, const std::string& name, const ModuleOptions& o);

  /// It has no logits.
  Sum operator()(const Full& x_BLD, const Tokens& tokens, KvCache* kv_cache = nullptr,
                 MaxLogits* logits = nullptr) const override;
  void each_param(const std::function<void(Stored&)>& f) override;
  double flops(std::int64_t sequence) const override;
  std::optional<AttentionOptions> sees() const override { return std::nullopt; }

 private:
  /// Tokens that are computed at once: so many that work within a chunk is as large as that on the
  /// state.
  std::int64_t chunk() const;

  DeltaNetConfig config_;
  std::int64_t group_;            // value heads of a key head
  ColumnWeight qkvz_, ba_;        // by key head: q, k, its values, its gates; its betas, its decays
  Cut conv_q_, conv_k_, conv_v_;  // taps of each channel; one tensor on disk
  Cut a_log_, dt_bias_;           // of each value head
  RmsNorm norm_;                  // of each value head
  RowWeight out_;
};

}  // namespace moesh::nn
