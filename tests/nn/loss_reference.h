#pragma once
// Every loss term as its formula says it, on all tokens at once, and over the tokens that count
// only: the others are taken out, not multiplied by zero. What a mesh and one rank both get wrong
// differs from this. T tokens, S sequences, L their length, E experts, K top-k, V vocabulary

#include <ATen/ATen.h>

#include <string>

#include "moesh/comm/mesh.h"

namespace moesh::losses {

/// Which labels there are.
enum class Mask { all, few, none_in_one_sequence, none_on_one_rank, none };
inline constexpr Mask kMasks[] = {Mask::all, Mask::few, Mask::none_in_one_sequence,
                                  Mask::none_on_one_rank, Mask::none};

inline std::string to_string(Mask m) {
  constexpr const char* kNames[] = {"all", "few", "none in one sequence", "none on one rank",
                                    "none"};
  return kNames[static_cast<int>(m)];
}

/// bool [S, L]. The second quarter of every sequence is without a label where one rank has none:
/// whole shards of it, whichever way the mesh cuts four of them.
inline at::Tensor valid_tokens(Mask m, std::int64_t sequences, std::int64_t length) {
  at::Tensor valid = at::ones({sequences, length}, at::kBool);
  const auto quarter = (length + 3) / 4;
  switch (m) {
    case Mask::all: break;
    case Mask::few:
      valid = at::arange(sequences * length).remainder(7).eq(2).reshape({sequences, length});
      break;
    case Mask::none_in_one_sequence: valid.select(0, sequences - 1).fill_(false); break;
    case Mask::none_on_one_rank: valid.narrow(1, quarter, quarter).fill_(false); break;
    case Mask::none: valid.fill_(false);
  }
  return valid;
}

/// What one MoE layer has chosen, of all tokens: [T, ..].
struct Routed {
  at::Tensor logits_TE, probabilities_TE, experts_TK;

  Routed where(const at::Tensor& kept_T) const {
    return {logits_TE.index({kept_T}), probabilities_TE.index({kept_T}),
            experts_TK.index({kept_T})};
  }
};

/// int64 [E]
inline at::Tensor counts(const Routed& r, const at::Tensor& valid_SL) {
  return r.where(valid_SL.flatten())
      .experts_TK.flatten()
      .bincount({}, r.logits_TE.size(1))
      .to(at::kLong);
}

// E * sum_e f_e p_e of some tokens, f the part that expert e has of the best probabilities of each,
// p its mean probability; times the part that the tokens are of the step.
inline at::Tensor balance(const Routed& kept, std::int64_t num_step_tokens) {
  const auto tokens = kept.logits_TE.size(0), experts = kept.logits_TE.size(1),
             rows = kept.experts_TK.numel();
  if (tokens == 0) return kept.probabilities_TE.sum();
  const at::Tensor best = std::get<1>(kept.probabilities_TE.topk(kept.experts_TK.size(1), 1));
  const at::Tensor f =
      best.flatten().bincount({}, experts).to(at::kDouble) / static_cast<double>(rows);
  return static_cast<double>(experts) * (f * kept.probabilities_TE.mean(0)).sum() *
         (static_cast<double>(tokens) / static_cast<double>(num_step_tokens));
}

inline at::Tensor balance_over_micro_batch(const Routed& r, const at::Tensor& valid_SL,
                                           std::int64_t num_step) {
  return balance(r.where(valid_SL.flatten()), num_step);
}

inline at::Tensor balance_over_sequences(const Routed& r, const at::Tensor& valid_SL,
                                         std::int64_t num_step) {
  at::Tensor sum = at::zeros({}, at::kDouble);
  for (std::int64_t s = 0; s < valid_SL.size(0); ++s) {
    at::Tensor mine = at::zeros_like(valid_SL);
    mine[s] = valid_SL[s];
    sum = sum + balance(r.where(mine.flatten()), num_step);
  }
  return sum;
}

inline at::Tensor z_loss(const Routed& r, const at::Tensor& valid_SL, std::int64_t num_step) {
  return r.where(valid_SL.flatten()).logits_TE.exp().sum(1).log().square().sum() /
         static_cast<double>(num_step);
}

inline at::Tensor cross_entropy(const at::Tensor& logits_TV, const at::Tensor& labels_T,
                                std::int64_t num_step) {
  const at::Tensor kept = labels_T.ge(0), labels = labels_T.index({kept}).unsqueeze(1);
  return -logits_TV.index({kept}).log_softmax(1).gather(1, labels).sum() /
         static_cast<double>(num_step);
}

}  // namespace moesh::losses
