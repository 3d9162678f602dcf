#pragma once
// Options of a command that are not part of the configuration.

#include <optional>
#include <string>
#include <vector>

namespace moesh::cli {

using Args = std::vector<std::string>;

/// Takes `--name VALUE` or `--name=VALUE` out of the arguments; the first, if there are several.
std::optional<std::string> take(Args& args, const std::string& name);
/// A whole number, `least` or more; `initial` where it is not given.
int take_number(Args& args, const std::string& name, int initial, int least = 1);
double take_real(Args& args, const std::string& name, double initial);
/// Takes `--name` out, and says whether it was there.
bool take_flag(Args& args, const std::string& name);
/// What is left must be `count` words; throws Error (config) with `usage` if it is not.
void expect_words(const Args& args, size_t count, const std::string& usage);

}  // namespace moesh::cli
