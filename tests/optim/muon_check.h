#pragma once
// Muon against its formula, which is written out here for one rank.

#include <map>
#include <string>

#include "moesh/optim/rules.h"
#include "tests/optim/support.h"

namespace moesh::optim::muon_check {

inline constexpr MuonConfig kMuon{.momentum = 0.8, .weight_decay = 0.3};
inline constexpr double kRate = 0.1;

// A tall and a wide matrix, stacks of both, one whose four heads are matrices of their own, and one
// of which a rank has a single number.
struct Matrices {
  Param<Dense{I, I, I}> uncut{Model::spec("uncut", {9, 4}, {}), Model::init()};
  Param<Dense{I, I, F}> row{Model::spec("row", {7, 5}, {{tp, 1}}), Model::init()};
  Param<Dense{I, I, F}> heads{head_spec(), Model::init()};
  Param<Sparse{I, E, F}> up{Model::spec("up", {5, 7, 3}, {{ep, 0}, {etp, 1}}), Model::init()};
  Param<Sparse{I, E, F}> down{Model::spec("down", {5, 3, 7}, {{ep, 0}, {etp, 2}}, 1),
                              Model::init()};
  Param<Dense{I, I, I}> small{Model::spec("small", {2, 1}, {}), Model::init()};

  static ParamSpec head_spec() {
    ParamSpec spec = Model::spec("heads", {12, 5}, {{tp, 0}});
    spec.num_heads = 4;
    return spec;
  }
  template <class Fn>
  void each_param(Fn f) {
    f(uncut), f(row), f(heads), f(up), f(down), f(small);
  }
};

/// What this rank has of every parameter after some steps.
std::map<std::string, at::Tensor> train(const MuonConfig& config, int num_steps = 3);

/// The first parameter that three steps on a mesh move elsewhere than the formula does, or "".
std::string complaint(const MeshShape& shape, const MuonConfig& config);

}  // namespace moesh::optim::muon_check
