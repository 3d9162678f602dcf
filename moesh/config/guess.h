#pragma once
// Guesses what a user meant by a name that does not exist.

#include <optional>
#include <string>
#include <vector>

namespace moesh::config {

/// The one among `names` that a user most likely meant by `wrong`: few letters differ, or
/// the key is in another section. Nothing: more than half of the word is wrong.
std::optional<std::string> nearest_name(const std::string& wrong,
                                        const std::vector<std::string>& names);

/// Names that other frameworks (torchtitan, Megatron, transformers, DeepSpeed) have for an option,
/// or that people guess.
struct Guesses {
  std::string answer;  // "--data.sequence_length", "--training.dtype=bfloat16", or a sentence
  std::vector<std::string> names;  // with '_' for '-'; "lora." is every key of that section
};
const std::vector<Guesses>& guesses();

/// The answer for a name, with '-' or '_', whatever section it is in: "--seq-len" is
/// --data.sequence_length, and "--tp" with the value 2 is --mesh tp=2. Nothing: no guess.
std::optional<std::string> answer_to(const std::string& name, const std::string& value);

/// The same for axes of a mesh: "fsdp" is dp_shard.
std::optional<std::string> axis_elsewhere(const std::string& axis);

}  // namespace moesh::config
