#pragma once
// Which experts tokens go to, by force, so that times of different programs and days compare.
// T tokens, E experts, K top-k

#include <ATen/ATen.h>

#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/nn/routing.h"

namespace moesh::bench {

/// int64 [T, K]: draws without putting back, expert e as often as loads_E[e] says.
inline at::Tensor drawn(std::int64_t num_tokens, std::int64_t top_k, const at::Tensor& loads_E) {
  const at::Tensor noise = at::rand({num_tokens, loads_E.size(0)}, loads_E.options());
  return std::get<1>(at::topk(loads_E.log() - noise.clamp_min(1e-7).log().neg().log(), top_k,
                              1));  // Gumbel's noise
}

/// Every expert has T K / E rows, or one more, of tokens in no order.
inline at::Tensor balanced(std::int64_t num_tokens, std::int64_t top_k, std::int64_t num_experts,
                           at::Device device) {
  const auto whole = at::TensorOptions(device).dtype(at::kLong);
  const at::Tensor first = at::arange(num_tokens, whole).mul_(top_k),
                   order = at::randperm(num_tokens, whole);
  return (first.index_select(0, order).unsqueeze(1) + at::arange(top_k, whole))
      .remainder(num_experts);
}

/// Every token goes to the first K experts.
inline at::Tensor collapsed(std::int64_t num_tokens, std::int64_t top_k, at::Device device) {
  return at::arange(top_k, at::TensorOptions(device).dtype(at::kLong))
      .expand({num_tokens, top_k})
      .contiguous();
}

/// The choice of every layer in every step: `balanced`, `collapsed`, `random`, or loads from a file
/// with a line for each MoE layer, a number for each expert. Scores, weights and their gradients
/// are those of the router.
class GivenRouting : public nn::Probe {
 public:
  explicit GivenRouting(const std::string& kind) : kind_(kind) {
    if (kind == "balanced" || kind == "collapsed" || kind == "random") return;
    std::ifstream file(kind);
    for (std::string line; std::getline(file, line);) {
      std::istringstream numbers(line);
      loads_.emplace_back(std::istream_iterator<double>(numbers), std::istream_iterator<double>());
    }
    MOESH_CHECK(!loads_.empty(), ErrorKind::config, "--routing ", kind,
                ": no file of loads; it takes model, balanced, collapsed, random, or a file with a "
                "line for each MoE layer");
  }

  at::Tensor on_choice(const nn::Choice& c) override {
    at::Tensor& experts = choices_[{c.layer, c.micro_batch}];
    if (!experts.defined()) experts = choose(c);
    return experts;
  }

 private:
  at::Tensor choose(const nn::Choice& c) const {
    const auto num_tokens = c.experts_NK.size(0), top_k = c.experts_NK.size(1),
               num_experts = c.scores_NE.size(1);
    const at::Device device = c.experts_NK.device();
    if (kind_ == "balanced") return balanced(num_tokens, top_k, num_experts, device);
    if (kind_ == "collapsed") return collapsed(num_tokens, top_k, device);
    at::Tensor loads = at::ones({num_experts}, at::kDouble);
    if (kind_ != "random") {
      const auto layer = static_cast<std::size_t>(c.layer);
      MOESH_CHECK(
          layer < loads_.size() && loads_[layer].size() == static_cast<std::size_t>(num_experts),
          ErrorKind::config, "--routing ", kind_, ": MoE layer ", c.layer, " has no line of ",
          num_experts, " numbers");
      loads = at::tensor(loads_[layer], at::kDouble);
    }
    return drawn(num_tokens, top_k, loads.to(device).to(at::kFloat));
  }

  std::string kind_;
  std::vector<std::vector<double>> loads_;                               // by layer
  std::map<std::pair<std::int64_t, std::int64_t>, at::Tensor> choices_;  // by layer and micro-batch
};

}  // namespace moesh::bench
