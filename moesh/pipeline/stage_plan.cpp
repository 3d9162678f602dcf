#include "moesh/pipeline/stage_plan.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>

#include "moesh/base/error.h"
#include "moesh/base/text.h"

namespace moesh::pipeline {
namespace {

// Costs of all layers before each one, so that the cost of the layers [a, b) is a difference; the
// head is with the last one.
std::vector<double> sums(const PartCosts& costs) {
  std::vector<double> all{0};
  for (const double layer : costs.layers) all.push_back(all.back() + layer);
  all.back() += costs.head;
  return all;
}

constexpr double kNever = std::numeric_limits<double>::infinity();

// The least of combine(what came before, a stage of the layers [a, b)) over all plans of `stages`
// stages, with the plan that has it. Stages that cost more than `limit` do not count.
template <class Combine>
std::pair<double, StagePlan> best_plan(const std::vector<double>& before, int stages, double limit,
                                       Combine combine) {
  const int n = static_cast<int>(before.size()) - 1;
  const auto at = [n](int stage, int layers) {
    return static_cast<size_t>(stage * (n + 1) + layers);
  };
  std::vector<double> best(at(stages, n) + 1, kNever);
  std::vector<int> start(best.size());
  best[at(0, 0)] = 0;
  for (int k = 1; k <= stages; ++k)
    for (int b = k; b <= n; ++b)
      for (int a = k - 1; a < b; ++a) {
        const double cost = before[static_cast<size_t>(b)] - before[static_cast<size_t>(a)];
        if (cost > limit || best[at(k - 1, a)] == kNever) continue;
        const double whole = combine(best[at(k - 1, a)], cost);
        if (whole < best[at(k, b)]) best[at(k, b)] = whole, start[at(k, b)] = a;
      }
  StagePlan plan;
  for (int k = stages, b = n; k > 0; b = start[at(k, b)], --k)
    plan.insert(plan.begin(), b - start[at(k, b)]);
  return {best[at(stages, n)], plan};
}

}  // namespace

StagePlan balanced_plan(const PartCosts& costs, int num_stages) {
  const int num_layers = static_cast<int>(costs.layers.size());
  MOESH_CHECK(num_stages >= 1 && num_layers >= num_stages, ErrorKind::config, "a model of ",
              num_layers, " layers does not make ", num_stages,
              " stages of a pipeline; every stage has at least one layer");
  const auto before = sums(costs);
  const double least = best_plan(before, num_stages, kNever, [](double a, double b) {
                         return std::max(a, b);
                       }).first;
  return best_plan(before, num_stages, least * (1 + 1e-9),
                   [](double a, double b) { return a + b * b; })
      .second;
}

StagePlan given_plan(const std::string& text, int num_layers) {
  StagePlan plan;
  for (const std::string& part : split(text, ',')) {
    const auto n = number_of<int>(part);
    MOESH_CHECK(n && *n >= 1, ErrorKind::config, "layers of the stages are '", text, "', and '",
                part,
                "' is not a number of layers; write one number, or one for each stage as in "
                "4,5,5,4");
    plan.push_back(*n);
  }
  if (plan.size() == 1) {
    const int each = std::min(plan[0], num_layers);
    plan.assign(static_cast<size_t>((num_layers + each - 1) / each), each);
    plan.back() = num_layers - each * static_cast<int>(plan.size() - 1);
  }
  const std::int64_t sum = std::accumulate(plan.begin(), plan.end(), std::int64_t{0});
  MOESH_CHECK(sum == num_layers, ErrorKind::config, "layers of the stages are '", text,
              "', which are ", sum, ", and the model has ", num_layers,
              "; they must make up the whole model");
  return plan;
}

std::string plan_text(const StagePlan& plan) {
  std::string text;
  for (const int n : plan) text += (text.empty() ? "" : ",") + std::to_string(n);
  return text;
}

}  // namespace moesh::pipeline
