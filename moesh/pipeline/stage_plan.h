#pragma once
// Which layers of a model a stage has.

#include <string>
#include <vector>

namespace moesh::pipeline {

/// What the parts of a model cost, in any unit: FLOPs, or seconds.
struct PartCosts {
  std::vector<double> layers;
  double head = 0;  // it comes with the last layer
};

/// How many layers each stage has, in order.
using StagePlan = std::vector<int>;

/// The plan whose most expensive stage costs the least, and of those the one that is most even.
/// Every stage has a layer; throws Error (config) where there are fewer layers than stages.
StagePlan balanced_plan(const PartCosts& costs, int num_stages);

/// What the user wrote: "4,5,5,4" for each stage, or "5" for stages of 5 layers, the last of which
/// may have fewer. Throws Error (config) where that does not make all layers of the model.
StagePlan given_plan(const std::string& text, int num_layers);

/// "4,5,5,4", as given_plan takes it.
std::string plan_text(const StagePlan& plan);

}  // namespace moesh::pipeline
