#pragma once
// The rules by which a step moves parameters, and what all of them declare and are given.

#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moesh/kernels/update.h"
#include "moesh/optim/params.h"

namespace moesh::optim {

/// The extent of what a rule reads to move one element.
enum class RuleScope : std::uint8_t {
  element,    // that element, its gradient and its state: each rank moves its shards by itself, and
              // no bit depends on the mesh
  parameter,  // all of the parameter: its ranks meet
};

/// A tensor that a rule keeps for a parameter from step to step. It begins as zeros.
struct StateSpec {
  std::string name;  // in checkpoints it follows the name of the parameter: "exp_avg"
  std::optional<at::ScalarType> dtype = {};  // that of the master weights if not given
  /// The shape of a tensor that is the same on all ranks which have the parameter, for rules that
  /// see parameters. Not given: it has the shape of the parameter and is cut and stored like it.
  std::optional<std::vector<std::int64_t>> shape = {};
};

/// A parameter in a step, as this rank has it.
struct ParamInStep {
  const Stored* stored;           // name, shape, axes: which cut it, store it, replicate it
  at::Tensor value;               // [stored->shard.length]
  at::Tensor gradient;            // likewise, before it is clipped, and maybe in the type of the
                                  // work; not read after the rule
  std::vector<at::Tensor> state;  // as declared, in that order
  Decay decay;
};

/// The numbers of a step, where the parameters are: the host enqueues an update before it knows the
/// norm of the gradients, and a CUDA graph reads in every step what is there then.
struct RuleStep {
  /// float64 [4]: learning rate, number of the step (from 1), the factor of the gradients that
  /// clips them, and whether the step is skipped (not 0).
  at::Tensor numbers;

  at::Tensor lr() const { return numbers.select(0, 0); }
  at::Tensor number() const { return numbers.select(0, 1); }
  at::Tensor clipped(const ParamInStep& p) const {
    return kernels::cast(p.gradient, p.stored->spec.dtype) * numbers.select(0, 2);
  }
  /// Writes a new value or state: in a step that is skipped all of them stay.
  void write(const at::Tensor& to, const at::Tensor& value) const {
    at::Tensor(to).copy_(at::where(numbers.select(0, 3).ne(0), to, value));
  }
};

/// An update rule. It holds its settings and nothing of any parameter, so one rule serves many.
class Rule {
 public:
  virtual ~Rule() = default;

  virtual RuleScope scope() const = 0;
  /// The state that it keeps for this parameter.
  virtual std::vector<StateSpec> state(const Stored& w) const = 0;
  /// Moves the values and the states in place, without autograd; none of them in a step that is
  /// skipped. It does not read numbers of the device, for which the host would wait. A rule that
  /// sees elements gets the shards that are not empty; one that sees parameters gets all of them,
  /// in the same order on every rank, so that all enter the same collectives.
  virtual void update(const std::vector<ParamInStep>& params, const RuleStep& step) const = 0;
};

// The update rules that a configuration can ask for, by name.

/// The values of the keys that a rule reads, by key; of a switch 0 or 1.
using RuleValues = std::map<std::string, double>;

/// A rule is a class, and a line in the table of rules.cpp.
struct RuleKind {
  std::string name;               // as optimizer.name has it
  std::vector<std::string> keys;  // of [optimizer] that it reads, besides lr
  std::shared_ptr<const Rule> (*make)(const RuleValues& values);  // has a value for each key
  /// Which parameters it moves, and the name of the rule that moves the others; null: all of them.
  bool (*is_for)(const Stored& w) = nullptr;
  std::string rule_of_others = {};
};

const std::vector<RuleKind>& rule_kinds();
std::vector<std::string> rule_names();
/// Throws Error (config), which names the known ones, if there is none of this name.
const RuleKind& find_rule(const std::string& name);

// AdamW: the mean and the mean square of the gradients of each element.

struct AdamWConfig {
  double beta1 = 0.9, beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  // of parameters with Decay::on

  void validate() const;
};

/// AdamW (Loshchilov and Hutter, 2019): weight decay beside the gradient, not in it. In step t,
/// from 1:
///   m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
///   w = w - lr weight_decay w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
class AdamW final : public Rule {
 public:
  explicit AdamW(const AdamWConfig& config = {});

  RuleScope scope() const override { return RuleScope::element; }
  std::vector<StateSpec> state(const Stored& w) const override;
  void update(const std::vector<ParamInStep>& params, const RuleStep& step) const override;

 private:
  AdamWConfig config_;
};

// Gradient descent with momentum.

struct SgdConfig {
  double momentum = 0.9;    // 0: none, and no state
  double weight_decay = 0;  // of parameters with Decay::on

  void validate() const;
};

/// As torch.optim.SGD, with b = 0 at first:
///   b = momentum b + (g + weight_decay w)          w = w - lr b
class Sgd final : public Rule {
 public:
  explicit Sgd(const SgdConfig& config = {});

  RuleScope scope() const override { return RuleScope::element; }
  std::vector<StateSpec> state(const Stored& w) const override;
  void update(const std::vector<ParamInStep>& params, const RuleStep& step) const override;

 private:
  SgdConfig config_;
};

// Muon: momentum whose matrices are made nearly orthogonal before they move the weights.

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
