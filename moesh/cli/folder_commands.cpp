// The commands that work on files and folders of tensors: convert, compare, and inspect, which also
// shows tokens.

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/base/text.h"
#include "moesh/checkpoint/convert.h"
#include "moesh/checkpoint/folder.h"
#include "moesh/checkpoint/load.h"
#include "moesh/cli/commands.h"
#include "moesh/data/tokenize.h"
#include "moesh/formats/file.h"
#include "moesh/formats/manifest.h"
#include "moesh/models/adapter.h"
#include "moesh/models/disk.h"
#include "moesh/train/checkpointer.h"
#include "moesh/verify/compare.h"

namespace moesh::cli {

namespace {

template <class T>
T one_of(const std::string& option, const std::string& text,
         const std::vector<std::pair<std::string, T>>& choices) {
  std::string names;
  for (const auto& [name, value] : choices) {
    if (name == text) return value;
    names += (names.empty() ? "" : " or ") + name;
  }
  throw Error(ErrorKind::config, option + " is '" + text + "'; it takes " + names);
}

// The terms that the adapter of a folder adds to each parameter.
checkpoint::Merge merge_of(const models::AnyConfig& config, const std::filesystem::path& folder) {
  const models::Lora lora = models::read_adapter(config, folder);
  return {.adapter = folder,
          .table = models::adapter_table(config, lora),
          .additions = models::added_to(config, lora)};
}

}  // namespace

int run_convert(const Arguments& given) {
  checkpoint::ConvertOptions options;
  if (const auto layout = given.text("--layout"))
    options.layout =
        one_of<formats::ExpertLayout>("--layout", *layout,
                                      {{"per_expert", formats::ExpertLayout::per_expert},
                                       {"stacked", formats::ExpertLayout::stacked}});
  if (const auto dtype = given.text("--dtype"))
    options.dtype = one_of<formats::Dtype>("--dtype", *dtype,
                                           {{"float32", formats::Dtype::f32},
                                            {"bfloat16", formats::Dtype::bf16},
                                            {"float16", formats::Dtype::f16},
                                            {"float64", formats::Dtype::f64}});
  given.expect_words(2);
  const Args& args = given.rest();
  const std::filesystem::path from = args[0];
  const std::string config = (from / "config.json").string();
  const auto architecture = models::config_of(checkpoint::read_config(from), config);
  const auto model = models::on_disk(architecture);
  const auto adapter = given.text("--adapter");
  MOESH_CHECK(adapter.has_value() == given.has("--merge"), ErrorKind::config,
              adapter ? "--adapter " + *adapter + " without --merge" : "--merge without --adapter",
              "; convert writes the weights of a model and an adapter together: give both");
  if (adapter) options.merge = merge_of(architecture, *adapter);
  if (given.has("--float8")) options.float8 = models::float8_params(architecture);
  if (train::keeps_bias_apart(from))
    log_warn(
        "'", from.string(),
        "' has an expert bias, and the files of its model have no place for it: it is left out, "
        "and programs that read '",
        args[1], "' choose experts without it");
  std::signal(SIGPIPE, SIG_IGN);  // a console that is gone ends printing, not the conversion
  const auto done = checkpoint::convert(from, args[1], model, options);
  std::printf("%s: %zu tensors, %.1f MiB in %zu files\n", printable(args[1]).c_str(),
              done.num_tensors, static_cast<double>(done.num_bytes) / (1 << 20), done.num_files);
  return 0;
}

int run_inspect(const Arguments& given) {
  given.expect_words(1);
  const Args& args = given.rest();
  if (!formats::is_folder(args[0])) {
    MOESH_CHECK(
        !given.has("--check"), ErrorKind::config, "--check is for a folder, and '", args[0],
        "' is not a folder; moesh tokenize --check PREFIX compares tokens with their checksums");
    const char* no_color = std::getenv("NO_COLOR");
    const bool has_colors = isatty(STDOUT_FILENO) != 0 && !(no_color && *no_color);
    std::printf("%s", data::show_document({.path = args[0],
                                           .document = given.number("--document", 0, 0),
                                           .tokenizer = given.text("--tokenizer").value_or(""),
                                           .begin_trained = has_colors ? "\033[32m" : "[[",
                                           .end_trained = has_colors ? "\033[0m" : "]]"})
                          .c_str());
    return 0;
  }
  for (const char* option : {"--document", "--tokenizer"})
    MOESH_CHECK(!given.has(option), ErrorKind::config, option, " is for a file of tokens, and '",
                args[0], "' is a folder");
  if (given.has("--check")) {
    MOESH_CHECK(formats::exists(std::filesystem::path(args[0]) / formats::kManifestFile),
                ErrorKind::config, "'", args[0], "' has no ", formats::kManifestFile,
                ", so there is nothing to check it against; was it written by moesh?");
    const auto damage = checkpoint::find_damage(args[0]);
    for (const auto& text : damage) std::printf("%s\n", printable(text).c_str());
    std::printf("%s: %s\n", printable(args[0]).c_str(),
                damage.empty() ? "every byte is as it was written" : "DAMAGED");
    return damage.empty() ? 0 : 1;
  }
  std::printf("%s", checkpoint::inspect(args[0]).c_str());
  return 0;
}

int run_compare(const Arguments& given) {
  verify::CompareOptions options;
  if (const double tolerance = given.real("--tolerance", -1); tolerance >= 0)
    options.tolerance = tolerance;
  for (const std::string& rename : given.texts("--rename")) {
    const auto at = rename.find('=');
    MOESH_CHECK(at != std::string::npos && at > 0, ErrorKind::config, "--rename is '", rename,
                "'; it takes PATTERN=REPLACEMENT, as in --rename '^module\\.=model.'");
    options.renames.emplace_back(rename.substr(0, at), rename.substr(at + 1));
  }
  const bool all = given.has("--all");
  given.expect_words(2);
  const verify::Comparison c = verify::compare(given.rest()[0], given.rest()[1], options);
  std::printf("%s\n", c.describe(all).c_str());
  return c.same() ? 0 : 1;
}

}  // namespace moesh::cli
