#pragma once
// The parameters that an optimizer works on, whatever their layouts: what the norm, the clip and
// the update go through.

#include <cstdint>
#include <vector>

#include "moesh/spmd/param.h"

namespace moesh::optim {

/// Whether weight decay pulls at a parameter. Norms, biases and other vectors are usually left out.
enum class Group : std::uint8_t { decay, no_decay };

/// An ordered list of parameters. It points at them: they outlive it, and stay where they are.
class ParamList {
 public:
  struct Entry {
    Stored* stored;
    Group group;
  };

  /// A name that is there already is an error, as are master weights that are neither float32 nor
  /// float64.
  template <auto L>
  void add(Param<L>& w, Group group = Group::decay) {
    add(w.stored(), group);
  }
  void add(Stored& w, Group group = Group::decay);

  /// This rank's part of each gradient, in the order of the list. A parameter that no backward has
  /// reached is an error which names it: a part of the model that took no part in the loss is a
  /// mistake, and one that is meant to rest is not put into the list.
  std::vector<at::Tensor> gradients() const;
  /// Sets every gradient to none.
  void zero_grad() const;

  std::size_t size() const { return entries_.size(); }
  const Entry& operator[](std::size_t i) const { return entries_[i]; }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

 private:
  std::vector<Entry> entries_;
};

}  // namespace moesh::optim
