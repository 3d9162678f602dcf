#pragma once
// Weights [out, in] of linear layers, by how tp cuts them.

#include <string>

#include "moesh/spmd/param.h"

namespace moesh::nn {

using Cut = Param<Dense{Place::I, Place::I, Place::F}>;    // own features on tp
using Whole = Param<Dense{Place::I, Place::I, Place::I}>;  // the same on every rank

/// What the parameters of a module have in common.
struct ModuleOptions {
  at::ScalarType dtype = at::kFloat;  // of the run; master weights of bfloat16 runs are float32
  at::Device device = at::kCPU;
  Init init{.kind = Init::Kind::normal, .scale = 0.02};

  at::ScalarType master() const { return dtype == at::kBFloat16 ? at::kFloat : dtype; }
  ParamSpec spec(const std::string& name, std::int64_t out, std::int64_t in) const {
    return {.name = name + ".weight", .shape = {out, in}, .dtype = master(), .compute = dtype, .device = device};
  }
};

/// Column: a rank computes its own slice of the outputs.
inline Cut column(const std::string& name, std::int64_t out, std::int64_t in, const ModuleOptions& o) {
  ParamSpec spec = o.spec(name, out, in);
  spec.cuts = {{tp, 0}};
  return Cut(spec, o.init);
}
/// Row: a rank has its own slice of the inputs, and a partial sum of the outputs.
inline Cut row(const std::string& name, std::int64_t out, std::int64_t in, const ModuleOptions& o) {
  ParamSpec spec = o.spec(name, out, in);
  spec.cuts = {{tp, 1}};
  return Cut(spec, o.init);
}
inline Whole whole(const std::string& name, std::int64_t out, std::int64_t in, const ModuleOptions& o) {
  return Whole(o.spec(name, out, in), o.init);
}

}  // namespace moesh::nn
