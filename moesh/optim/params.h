#pragma once
// The parameters that an optimizer works on, whatever their layouts: the list that the norm, the
// clip and the update go through.

#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "moesh/fsdp/param.h"
#include "moesh/spmd/tensor.h"

namespace moesh::optim {

/// Whether weight decay pulls at a parameter. Norms, biases and other vectors usually stay out.
enum class Decay : std::uint8_t { on, off };

/// An ordered list of parameters. It points at them: they outlive it, and stay where they are.
class ParamList {
 public:
  struct Entry {
    Stored* stored;
    Decay decay;
  };

  /// A second parameter of one name is an error, as are master weights that are neither float32
  /// nor float64. One that is not trained is passed over.
  template <auto L>
  void add(Param<L>& w, Decay decay = Decay::on) {
    add(w.stored(), decay);
  }
  void add(Stored& w, Decay decay = Decay::on);

  /// This rank's shard of each gradient, in the order of the list. A parameter that no backward has
  /// reached is an error which names it: a layer that the loss does not depend on is a mistake.
  std::vector<at::Tensor> gradients() const;
  /// Sets every gradient to none.
  void zero_grad() const;

  std::size_t size() const { return entries_.size(); }
  /// The device of the parameters that were added. Throws Error (config) where none was; a stage of
  /// a pipeline may have none that is trained.
  at::Device device() const;
  const Entry& operator[](std::size_t i) const { return entries_[i]; }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

 private:
  std::vector<Entry> entries_;
  std::optional<at::Device> device_;
  std::unordered_set<std::string_view> names_;
};

// The norm of the gradients of all parameters, of both views of the mesh.

using Norm = Tensor<Dense{Place::I, Place::I, Place::I}>;

/// The 2-norm, a scalar in float64. Every element of every parameter counts once: where ranks hold
/// the same shard, the first of them counts it. So one all_reduce over the world sums all layouts,
/// every rank gets the same bits even if replicas have drifted apart, and a gradient that is not
/// finite on one rank, replica or not, makes the norm not finite on all.
Norm grad_norm(const ParamList& params);

}  // namespace moesh::optim
