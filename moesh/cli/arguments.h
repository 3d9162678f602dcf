#pragma once
// Options of a command that are not part of the configuration.

#include <optional>
#include <string>
#include <vector>

#include "moesh/config/config.h"
#include "moesh/train/build.h"

namespace moesh::cli {

using config::Config;
using train::ModelSetup;

using Args = std::vector<std::string>;

/// Takes `--name VALUE` or `--name=VALUE` out of the arguments; the first, if there are several.
std::optional<std::string> take(Args& args, const std::string& name);
/// A whole number, 1 or more.
int take_number(Args& args, const std::string& name, int otherwise);
double take_real(Args& args, const std::string& name, double otherwise);
/// Takes `--name` out, and says whether it was there.
bool take_flag(Args& args, const std::string& name);
/// What is left are `count` words; throws with `usage` otherwise.
void expect_words(const Args& args, size_t count, const std::string& usage);

/// The configuration that the remaining arguments ask for, with its model.
struct Loaded {
  Config config;
  ModelSetup model;
};
Loaded load(const Args& args);

}  // namespace moesh::cli
