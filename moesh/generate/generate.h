#pragma once
// Texts of a trained model: a prompt, and what the model says after it.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <set>
#include <vector>

#include "moesh/train/build.h"

namespace moesh::generate {

// The next token, chosen from the logits of all of them.

struct ChooseOptions {
  double temperature = 0;  // logits are divided by it; 0: the largest is taken, always
  // Only the likeliest tokens are drawn from, as few as together have this probability.
  double top_p = 1;
  std::uint64_t seed = 0;

  void validate() const;
};

/// Chooses a token by its logits [V]. `index` is the number of the choice, so that a text depends
/// on the seed only, not on what happened before. Of equal logits the first is taken, and counts as
/// the likelier one for top_p.
std::int64_t choose_token(const at::Tensor& logits_V, const ChooseOptions& options,
                          std::int64_t index);

using train::Config;

struct GenerateOptions {
  std::vector<std::int64_t> prompt;
  std::int64_t max_new_tokens = 64;
  ChooseOptions choose;
  std::set<std::int64_t> stop;  // ids that end the text
};

struct Generated {
  std::vector<std::int64_t> ids;  // the new tokens; one that ends the text is the last of them
  bool has_stopped = false;       // at such a token
  double prompt_seconds = 0;      // until the first new token
  double seconds = 0;             // of all others together
};

/// On every rank of the world, under its mesh: all get the same ids. The prompt is one pass, and
/// each further token costs one row: `kv_cache` of the layers is kept.
Generated generate(models::Model& model, comm::Group& world, const Config& config,
                   const GenerateOptions& options);

/// Starts the ranks of the configuration, each with its part of the weights of
/// checkpoint.initial_load. The result is that of rank 0; without ids where another process has it.
Generated generate(const Config& config, const GenerateOptions& options);

}  // namespace moesh::generate
