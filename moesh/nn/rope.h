#pragma once
// Rotary position embedding: plain, and stretched for contexts longer than those of pre-training.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "moesh/kernels/rowwise.h"
#include "moesh/types/token.h"

namespace moesh::nn {

/// How frequencies are stretched by a factor above 1.
enum class RopeScaling {
  yarn,    // Peng et al., 2023: fast waves stay, slow ones are stretched, cos and sin grow a little
  llama3,  // Llama 3: the same idea by wave length, without the growth
  linear,  // all of them
};

struct RopeConfig {
  std::int64_t dim = 0;  // rotated features of a head
  double theta = 10000;
  bool interleaved =
      false;  // pairs (2i, 2i + 1) rotate, output laid out evens then odds; else (i, i + dim / 2)
  double factor = 1;
  RopeScaling scaling = RopeScaling::yarn;
  std::int64_t original_length = 4096;
  // Llama 3: waves longer than original_length / low_turns are stretched, those shorter than
  // original_length / high_turns stay.
  double low_turns = 1, high_turns = 4;
  // YaRN.
  double beta_fast = 32, beta_slow = 1;
  double mscale = 0, mscale_all_dim = 0;
  double magnitude =
      0;  // what cos and sin are multiplied with; 0: it follows from the factor and these two
  bool truncate = true;  // YaRN's bounds are rounded outwards to whole frequencies

  bool operator==(const RopeConfig&) const = default;
  void validate() const;
  /// Factor of the softmax scale: m^2, m = 0.1 * mscale_all_dim * ln(factor) + 1; 1
  /// without.
  double attention_factor() const;
};

/// The frequencies [dim / 2], float64.
at::Tensor rope_frequencies(const RopeConfig& config);

/// cos and sin of positions: [their number, dim / 2] each, with YaRN's magnitude.
struct RopeTable {
  at::Tensor cos, sin;
  // int64 [B, L]: the line of each token; undefined: token l of a sequence has line l.
  at::Tensor positions_BL = {};

  kernels::Rotation last_features(bool interleaved) const {
    return {cos, sin, positions_BL, interleaved};
  }
  kernels::Rotation first_features(bool interleaved) const {
    return {cos, sin, positions_BL, interleaved, /*leading=*/true};
  }
};
RopeTable rope_table(const RopeConfig& config, const PositionRanges& positions,
                     at::ScalarType dtype, at::Device device);

/// The tables of a model on one rank, which its layers share. They are computed on the host in
/// float64: each is made when it is first asked for, and kept.
class RopeTables {
 public:
  RopeTable at(const RopeConfig& config, const PositionRanges& positions, at::ScalarType dtype,
               at::Device device);

 private:
  struct CachedTable {
    RopeConfig config;
    PositionRanges positions;
    at::ScalarType dtype;
    at::Device device;
    RopeTable table;
  };
  std::vector<CachedTable> entries_;  // the last one asked for is the last
};

/// Rotates the last features of x [B, L, heads, ..], or the first ones, two for each column of the
/// table, each token by its line of the table; the others stay. x that is consumed is no one
/// else's, nor is the gradient of the result.
at::Tensor rotate(const at::Tensor& x, const kernels::Rotation& rotation,
                  kernels::Argument argument = kernels::Argument::kept);

}  // namespace moesh::nn
