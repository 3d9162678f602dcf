#include "moesh/fsdp/float8_counts.h"

#include <ATen/ops/zeros.h>

#include <charconv>
#include <string_view>

#include "moesh/fsdp/step_state.h"

namespace moesh {
namespace {

// The layer of "model.layers.3.mlp.experts.w1"; -1: it is in none.
std::int64_t layer_of(std::string_view name) {
  constexpr std::string_view kLayers = "model.layers.";
  std::int64_t layer = -1;
  if (name.starts_with(kLayers))
    std::from_chars(name.data() + kLayers.size(), name.data() + name.size(), layer);
  return layer;
}

// Whether no rank before this one has the same rows, where a weight is cut along one of its sides:
// the other side is whole on all ranks that cut it.
bool is_first_with_rows(const Stored& w, std::int64_t side) {
  Axes whole = w.cutting;
  for (const auto& [axis, dim] : w.spec.cuts)
    // Experts are cut along dimension 0 of three, and each has its own rows.
    if (const auto num_dims = static_cast<std::int64_t>(w.spec.shape.size());
        dim == num_dims - 2 + side || dim == num_dims - 3)
      whole = without(whole, axis);
  return current_mesh().coordinate(whole) == 0;
}

}  // namespace

StepFloat8Counts::StepFloat8Counts(std::int64_t num_layers, at::Device device)
    : all_(at::zeros({num_layers, 2, 3, 3}, at::TensorOptions(device).dtype(at::kLong))) {}

kernels::Float8Counts StepFloat8Counts::of(const Stored& w) const {
  const std::int64_t layer = layer_of(w.spec.name);
  if (layer < 0) return {};
  constexpr std::int64_t kOut = 0, kIn = 1;
  return {.counts = all_[layer][w.storage == efsdp ? 0 : 1],
          .has_inputs = is_first_with_rows(w, kIn),
          .has_gradients = is_first_with_rows(w, kOut)};
}

void StepFloat8Counts::add_weight(const Stored& w, const at::Tensor& numbers) {
  const kernels::Float8Counts to = of(w);
  const Mesh& mesh = current_mesh();
  if (!to.defined() || mesh.coordinate(w.storage) != 0 || mesh.coordinate(w.replicas) != 0 ||
      !weights_.insert(w.spec.name).second)
    return;
  // Where codes are kept they are all that products read, and were made of the master weights.
  kernels::count_float8_weight(to.weights(),
                               w.float8 ? w.value.detach().to(w.spec.of_work()) : numbers.detach(),
                               w.spec.float8_tile);
}

kernels::Float8Counts float8_counts(const Stored& w) {
  const StepState* step = StepState::current();
  return step && step->float8_counts ? step->float8_counts->of(w) : kernels::Float8Counts();
}

}  // namespace moesh
