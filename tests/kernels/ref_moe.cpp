#include "tests/kernels/ref_moe.h"

#include <ATen/ATen.h>

#include <limits>
#include <vector>

#include "moesh/base/error.h"

namespace moesh::kernels::ref {
namespace {

constexpr double kMasked = -std::numeric_limits<double>::infinity();

/// The index of the largest value, the first one among equals.
size_t argmax(const std::vector<double>& values) {
  size_t best = 0;
  for (size_t i = 1; i < values.size(); ++i) {
    if (values[i] > values[best]) best = i;
  }
  return best;
}

/// The k largest, one after another. Chosen ones are taken out by a flag, so that -inf can be
/// chosen too.
std::vector<std::int64_t> largest(const std::vector<double>& values, std::int64_t k) {
  std::vector<std::int64_t> out;
  std::vector<bool> taken(values.size());
  for (std::int64_t i = 0; i < k; ++i) {
    std::int64_t best = -1;
    for (size_t j = 0; j < values.size(); ++j) {
      if (!taken[j] && (best < 0 || values[j] > values[best])) best = static_cast<std::int64_t>(j);
    }
    taken[best] = true;
    out.push_back(best);
  }
  return out;
}

/// Node-limited routing: all experts outside of the best groups become -inf.
void mask_groups(std::vector<double>& scores, std::int64_t num_groups, std::int64_t top_groups) {
  const size_t size = scores.size() / num_groups;
  std::vector<double> group_scores;
  for (std::int64_t g = 0; g < num_groups; ++g) {
    std::vector<double> group(scores.begin() + g * size, scores.begin() + (g + 1) * size);
    const size_t first = argmax(group);
    const double best = group[first];
    group[first] = kMasked;
    group_scores.push_back(best + group[argmax(group)]);
  }
  const auto kept = largest(group_scores, top_groups);
  for (size_t e = 0; e < scores.size(); ++e) {
    if (std::find(kept.begin(), kept.end(), static_cast<std::int64_t>(e / size)) == kept.end())
      scores[e] = kMasked;
  }
}

}  // namespace

Routing route(const RouterConfig& config, const at::Tensor& logits_TE, const at::Tensor& bias_E) {
  const std::int64_t num_tokens = logits_TE.size(0), num_experts = logits_TE.size(1);
  MOESH_CHECK(config.num_groups == 1 ||
                  (num_experts % config.num_groups == 0 && num_experts / config.num_groups >= 2),
              ErrorKind::config, num_experts, " experts in ", config.num_groups,
              " groups; groups are equal and hold two experts or more");
  Routing out{at::empty({num_tokens, config.top_k}, at::kLong), {}};
  std::vector<at::Tensor> weights;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const at::Tensor logits = logits_TE[t];
    at::Tensor scores = logits;
    if (config.score == ScoreFunction::sigmoid) scores = at::sigmoid(logits);
    if (config.score == ScoreFunction::softmax) scores = at::softmax(logits, 0);
    std::vector<double> choice;
    for (std::int64_t e = 0; e < num_experts; ++e) {
      choice.push_back(scores[e].item<double>() +
                       (bias_E.defined() ? bias_E[e].item<double>() : 0));
    }
    if (config.num_groups > 1) mask_groups(choice, config.num_groups, config.top_groups);
    const auto chosen = largest(choice, config.top_k);
    std::vector<at::Tensor> w;
    for (std::int64_t k = 0; k < config.top_k; ++k) {
      out.experts_TK[t][k] = chosen[k];
      w.push_back(scores[chosen[k]]);
    }
    at::Tensor weights_K = at::stack(w);
    if (config.score == ScoreFunction::softmax_of_chosen) weights_K = at::softmax(weights_K, 0);
    if (config.normalise) weights_K = weights_K / (weights_K.sum() + config.epsilon);
    weights.push_back(weights_K * config.scale);
  }
  out.weights_TK =
      weights.empty() ? at::zeros({0, config.top_k}, logits_TE.options()) : at::stack(weights);
  return out;
}

at::Tensor experts(const ExpertsConfig& config, const ExpertsWeights& weights,
                   const at::Tensor& x_TD, const Routing& routing) {
  const auto plus = [](const at::Tensor& y, const at::Tensor& bias_eX, std::int64_t e) {
    return bias_eX.defined() ? y + bias_eX[e] : y;
  };
  std::vector<at::Tensor> y_TD;
  for (std::int64_t t = 0; t < x_TD.size(0); ++t) {
    at::Tensor y = at::zeros_like(x_TD[t]);
    for (std::int64_t k = 0; k < routing.experts_TK.size(1); ++k) {
      const auto e = routing.experts_TK[t][k].item<std::int64_t>();
      const at::Tensor score = routing.weights_TK[t][k];
      const at::Tensor x = config.scores == ScoreSide::before ? x_TD[t] * score : x_TD[t];
      const at::Tensor g = plus(at::mv(weights.w1_eFD[e], x), weights.b1_eF, e);
      const at::Tensor u = plus(at::mv(weights.w3_eFD[e], x), weights.b3_eF, e);
      at::Tensor h;
      if (config.activation == Activation::swiglu) {
        h = at::silu(g) * u;
      } else {
        const at::Tensor clamped_g = at::clamp_max(g, 7.0), clamped_u = at::clamp(u, -7.0, 7.0);
        h = (clamped_u + 1) * (clamped_g * at::sigmoid(clamped_g * 1.702));
      }
      at::Tensor one = plus(at::mv(weights.w2_eDF[e], h), weights.b2_eD, e);
      if (config.scores == ScoreSide::after) one = one * score;
      y = y + one;
    }
    y_TD.push_back(y);
  }
  return y_TD.empty() ? at::zeros_like(x_TD) : at::stack(y_TD);
}

at::Tensor moe(const RouterConfig& router, const ExpertsConfig& config,
               const MoeParameters& parameters, const at::Tensor& x_TD) {
  std::vector<at::Tensor> logits;
  for (std::int64_t t = 0; t < x_TD.size(0); ++t) {
    const at::Tensor one = at::mv(parameters.gate_ED, x_TD[t]);
    logits.push_back(parameters.gate_bias_E.defined() ? one + parameters.gate_bias_E : one);
  }
  const at::Tensor logits_TE = logits.empty()
                                   ? at::zeros({0, parameters.gate_ED.size(0)}, x_TD.options())
                                   : at::stack(logits);
  return experts(config, parameters.experts, x_TD,
                 route(router, logits_TE, parameters.expert_bias_E));
}

}  // namespace moesh::kernels::ref
