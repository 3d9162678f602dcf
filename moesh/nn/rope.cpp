#include "moesh/nn/rope.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <span>

#include "moesh/base/error.h"
#include "moesh/kernels/graph.h"
#include "moesh/nn/tokens.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/tensor.h"

namespace moesh::nn {
namespace {

constexpr std::size_t kMostTables = 8;  // kinds of layers times lengths of sequences

double growth(double factor, double scale) { return 0.1 * scale * std::log(factor) + 1; }

// The frequency index whose wave turns `turns` times over the original length.
double index_of(double turns, const RopeConfig& c) {
  return static_cast<double>(c.dim) *
         std::log(static_cast<double>(c.original_length) / (turns * 2 * std::numbers::pi)) /
         (2 * std::log(c.theta));
}

// By how often a wave turns over the original length: often, it stays; seldom, it is stretched;
// between them a ramp.
void stretch_llama3(const RopeConfig& c, at::Tensor& frequencies) {
  const auto count = static_cast<size_t>(frequencies.numel());
  for (double& f : std::span(frequencies.data_ptr<double>(), count)) {
    const double turns = static_cast<double>(c.original_length) * f / (2 * std::numbers::pi);
    if (turns >= c.high_turns) continue;
    const double kept =
        turns < c.low_turns ? 0 : (turns - c.low_turns) / (c.high_turns - c.low_turns);
    f = (1 - kept) * f / c.factor + kept * f;
  }
}

}  // namespace

void RopeConfig::validate() const {
  MOESH_CHECK(dim >= 2 && dim % 2 == 0, ErrorKind::config, "rope: ", dim,
              " rotated features; it takes an even number");
  MOESH_CHECK(theta > 1, ErrorKind::config, "rope: theta is ", theta, "; it takes more than 1");
  MOESH_CHECK(factor >= 1 && original_length >= 1, ErrorKind::config, "rope: factor ", factor,
              " of original_length ", original_length, "; both take 1 or more");
  MOESH_CHECK(high_turns >= low_turns && low_turns > 0, ErrorKind::config, "rope: low_turns ",
              low_turns, " and high_turns ", high_turns,
              "; they take positive numbers in this order");
}

double RopeConfig::attention_factor() const {
  if (scaling != RopeScaling::yarn) return 1;
  const double m = growth(factor, mscale_all_dim);  // 1 where either says nothing
  return m * m;
}

at::Tensor rope_frequencies(const RopeConfig& c) {
  c.validate();
  at::Tensor frequencies = at::empty({c.dim / 2}, at::kDouble);
  auto* f = frequencies.data_ptr<double>();
  for (std::int64_t i = 0; i < c.dim / 2; ++i)
    f[i] = std::pow(c.theta, -2.0 * static_cast<double>(i) / static_cast<double>(c.dim));
  if (c.factor <= 1) return frequencies;
  if (c.scaling == RopeScaling::linear) return frequencies / c.factor;
  if (c.scaling == RopeScaling::llama3) {
    stretch_llama3(c, frequencies);
    return frequencies;
  }
  double low = index_of(c.beta_fast, c), high = index_of(c.beta_slow, c);
  if (c.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, static_cast<double>(c.dim - 1));
  if (low == high) high += 0.001;
  // Fast waves keep their frequency, slow ones are stretched, between them a ramp.
  const at::Tensor index = at::arange(frequencies.numel(), at::kDouble),
                   ramp = ((index - low) / (high - low)).clamp(0, 1);
  return frequencies / c.factor * ramp + frequencies * (1 - ramp);
}

RopeTable rope_table(const RopeConfig& c, const PositionRanges& positions, at::ScalarType dtype,
                     at::Device device) {
  const auto options = at::TensorOptions(device).dtype(wide_dtype(dtype));
  const std::int64_t length = total_length(positions);
  if (device.is_meta())
    return {.cos = at::empty({length, c.dim / 2}, options),
            .sin = at::empty({length, c.dim / 2}, options)};  // only shapes
  const at::Tensor angles = at::outer(as_tensor(positions, at::kDouble), rope_frequencies(c));
  double m = 1;
  if (c.factor > 1 && c.scaling == RopeScaling::yarn) {
    m = c.mscale != 0 && c.mscale_all_dim != 0
            ? growth(c.factor, c.mscale) / growth(c.factor, c.mscale_all_dim)
            : growth(c.factor, 1);
    if (c.magnitude != 0) m = c.magnitude;
  }
  return {.cos = (angles.cos() * m).to(options), .sin = (angles.sin() * m).to(options)};
}

RopeTable RopeTables::at(const RopeConfig& config, const PositionRanges& positions,
                         at::ScalarType dtype, at::Device device) {
  const auto wide = wide_dtype(dtype);
  const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const CachedTable& e) {
    return e.config == config && e.positions == positions && e.dtype == wide && e.device == device;
  });
  if (found != entries_.end()) {
    std::rotate(found, found + 1, entries_.end());
  } else {
    if (entries_.size() == kMostTables) entries_.erase(entries_.begin());
    entries_.push_back(
        {config, positions, wide, device, rope_table(config, positions, dtype, device)});
  }
  const RopeTable& table = entries_.back().table;
  kernels::keep_for_graph(table.cos), kernels::keep_for_graph(table.sin);
  return table;
}

at::Tensor rotate(const at::Tensor& x, const kernels::Rotation& rotation,
                  kernels::Argument argument) {
  return raw::map_linear(
      x, [&](const at::Tensor& t) { return kernels::rotate_forward(rotation, t, argument); },
      [rotation, argument](const at::Tensor& g) {
        return kernels::rotate_backward(rotation, g, argument);
      });
}

}  // namespace moesh::nn
