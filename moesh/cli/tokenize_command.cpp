// The command that turns texts into files of token ids.

#include <algorithm>
#include <cstdio>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/cli/arguments.h"
#include "moesh/cli/commands.h"
#include "moesh/config/options.h"
#include "moesh/data/tokenize.h"

namespace moesh::cli {
namespace {

const std::vector<std::string> kOptions{
    "--tokenizer", "--out",      "--field",   "--append-eod",    "--eod",  "--with-template",
    "--format",    "--on-error", "--threads", "--save-interval", "--check"};

}  // namespace

int run_tokenize(Args args) {
  if (auto prefix = take(args, "--check")) {
    expect_words(args, 0, "moesh tokenize --check PREFIX");
    for (const std::string ending : {".bin", ".idx", ".moesh.json"})
      if (prefix->ends_with(ending)) prefix->resize(prefix->size() - ending.size());
    data::check_token_files(*prefix);
    std::printf("%s: every byte is as it was written\n", prefix->c_str());
    return 0;
  }
  data::TokenizeOptions options{.tokenizer = take(args, "--tokenizer").value_or(""),
                                .out = take(args, "--out").value_or(""),
                                .format = take(args, "--format").value_or("auto"),
                                .field = take(args, "--field").value_or("text"),
                                .with_template = take_flag(args, "--with-template"),
                                .num_threads = take_number(args, "--threads", 0),
                                .save_interval = take_real(args, "--save-interval", 30),
                                .show_progress = true};
  const std::string on_error = take(args, "--on-error").value_or("stop");
  MOESH_CHECK(on_error == "stop" || on_error == "skip", ErrorKind::config, "--on-error is '",
              on_error, "'; it takes stop or skip");
  options.skip_errors = on_error == "skip";
  const auto eod = take(args, "--eod");
  if (take_flag(args, "--append-eod") || eod) {
    options.end_of_document = eod ? *eod : data::find_end_of_document(options.tokenizer);
    MOESH_CHECK(!options.end_of_document.empty(), ErrorKind::config,
                "--append-eod: the folder of the tokenizer has no tokenizer_config.json with an "
                "eos_token; name the token with --eod TOKEN");
  }
  for (const std::string& word : args) {
    if (word == "-" || !word.starts_with("-")) continue;
    const std::string name = word.substr(0, word.find('='));
    MOESH_CHECK(std::find(kOptions.begin(), kOptions.end(), name) == kOptions.end(),
                ErrorKind::config, "tokenize has ", name, " twice; keep one of them");
    throw Error(ErrorKind::config,
                detail::concat("tokenize has no option '", word, "'; the nearest that it has is ",
                               config::nearest_name(name, kOptions), ", and moesh help lists all"));
  }
  options.inputs = args;
  const auto s = data::tokenize(options);
  if (s.went_on_from > 0)
    std::printf("went on behind document %s\n", with_commas(s.went_on_from).c_str());
  std::printf("%s.bin, %s.idx: %s (%s) in %s of %s; %.1f s\n", options.out.c_str(),
              options.out.c_str(), counted(s.num_tokens, "token").c_str(), s.id_type,
              counted(s.num_documents, "document").c_str(), counted(s.num_files, "file").c_str(),
              s.seconds);
  if (s.num_empty > 0)
    std::printf("left out %s without text\n", counted(s.num_empty, "document").c_str());
  if (s.num_skipped > 0)
    std::printf("skipped %s that could not be read\n", counted(s.num_skipped, "line").c_str());
  return 0;
}

}  // namespace moesh::cli
