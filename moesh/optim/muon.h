#pragma once
// Muon: momentum whose matrices are made nearly orthogonal before they move the weights.

#include "moesh/optim/rule.h"

namespace moesh::optim {

struct MuonConfig {
  double momentum = 0.95;
  bool nesterov = true;
  double weight_decay = 0.1;                     // of parameters with Decay::on
  at::ScalarType newton_schulz = at::kBFloat16;  // or float32; float64 weights take float64
  bool by_head = false;                          // each head of an up-projection is a matrix
  // Parameters are sent together until about this many numbers of each rank.
  std::int64_t numbers_in_round = 1 << 26;

  void validate() const;
};

/// Whether Muon moves a parameter. Embedding, head, router's gate, norms and biases are not for it.
bool is_for_muon(const Stored& w);
/// FLOPs of a step that makes the matrices of a parameter, whole, nearly orthogonal.
double muon_flops(const Stored& w, bool by_head);

/// As torch.optim.Muon with adjust_lr_fn="match_rms_adamw", with b = 0 at first:
///   b = momentum b + (1 - momentum) g     u = nesterov ? (1 - momentum) g + momentum b : b
///   w = w - lr weight_decay w - lr 0.2 sqrt(max(n, m)) orthogonal(u)
/// for each matrix [n, m]: a parameter, an expert of it, or a head. On every mesh the matrix is
/// whole where orthogonal() is taken: the ranks that have parts of it send them to an owner, one of
/// them, which sends back their parts of the result, in two messages for many parameters. Owners
/// are chosen so that all ranks have as much to do.
class Muon final : public Rule {
 public:
  explicit Muon(const MuonConfig& config = {});

  RuleScope scope() const override { return RuleScope::parameter; }
  std::vector<StateSpec> state(const Stored& w) const override;
  void update(const std::vector<ParamInStep>& params, const RuleStep& step) const override;

 private:
  MuonConfig config_;
};

}  // namespace moesh::optim
