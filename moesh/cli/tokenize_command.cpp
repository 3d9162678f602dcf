// The command that turns texts into files of token ids.

#include <csignal>
#include <cstdio>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/cli/commands.h"
#include "moesh/data/tokenize.h"

namespace moesh::cli {

namespace {

std::map<std::string, std::string> pairs_of(const std::string& option, const Args& texts) {
  std::map<std::string, std::string> pairs;
  for (const std::string& text : texts) {
    const std::size_t sign = text.find('=');
    MOESH_CHECK(sign != std::string::npos && sign > 0, ErrorKind::config, option, " has '", text,
                "'; it takes NAME=VALUE");
    MOESH_CHECK(pairs.try_emplace(text.substr(0, sign), text.substr(sign + 1)).second,
                ErrorKind::config, option, " names '", text.substr(0, sign), "' twice");
  }
  return pairs;
}

data::ChatOptions chat_options(const Arguments& given) {
  data::ChatOptions options{.format = given.text("--chats").value_or("auto"),
                            .template_file = given.text("--chat-template").value_or(""),
                            .end_of_turn = !given.has("--no-end-of-turn")};
  if (const auto roles = given.text("--roles")) options.roles = split(*roles, ',');
  if (const auto fields = given.text("--chat-fields"))
    options.fields = pairs_of("--chat-fields", split(*fields, ','));
  options.variables = pairs_of("--template-variable", given.texts("--template-variable"));
  return options;
}

}  // namespace

data::TokenizeOptions tokenize_options(const Arguments& given) {
  data::TokenizeOptions options{.tokenizer = given.text("--tokenizer").value_or(""),
                                .out = given.text("--out").value_or(""),
                                .inputs = given.rest(),
                                .format = given.text("--format").value_or("auto"),
                                .field = given.text("--field").value_or("text"),
                                .with_template = given.has("--with-template"),
                                .chats = chat_options(given),
                                .num_threads = given.number("--threads", 0),
                                .save_interval = given.real("--save-interval", 30),
                                .show_progress = true};
  const std::string on_error = given.text("--on-error").value_or("stop");
  MOESH_CHECK(on_error == "stop" || on_error == "skip", ErrorKind::config, "--on-error is '",
              on_error, "'; it takes stop or skip");
  options.skip_errors = on_error == "skip";
  const auto eod = given.text("--eod");
  if (given.has("--append-eod") || eod) {
    options.end_of_document = eod ? *eod : data::find_end_of_document(options.tokenizer);
    MOESH_CHECK(!options.end_of_document.empty(), ErrorKind::config,
                "--append-eod: the folder of the tokenizer has no tokenizer_config.json with an "
                "eos_token; name the token with --eod TOKEN");
  }
  return options;
}

int run_tokenize(const Arguments& given) {
  if (auto prefix = given.text("--check")) {
    given.expect_words(0);
    for (const std::string ending : {".bin", ".idx", ".mask", ".moesh.json"})
      if (prefix->ends_with(ending)) prefix->resize(prefix->size() - ending.size());
    data::check_token_files(*prefix);
    std::printf("%s: every byte is as it was written\n", printable(*prefix).c_str());
    return 0;
  }
  const data::TokenizeOptions options = tokenize_options(given);
  std::signal(SIGPIPE, SIG_IGN);  // a console that is gone ends printing, not the work
  const auto s = data::tokenize(options);
  if (s.went_on_from > 0)
    std::printf("continued after document %s\n", with_commas(s.went_on_from).c_str());
  const std::string out = printable(options.out);
  std::printf("%s.bin, %s.idx%s: %s (%s) in %s of %s; %.1f s\n", out.c_str(), out.c_str(),
              s.has_mask ? (", " + out + ".mask").c_str() : "",
              counted(s.num_tokens, "token").c_str(), s.id_type,
              counted(s.num_documents, s.has_mask ? "conversation" : "document").c_str(),
              counted(s.num_files, "file").c_str(), s.seconds);
  if (s.has_mask)
    std::printf("trained on: %s, %.1f %%; the others are only read\n",
                counted(s.num_trained, "token").c_str(),
                100 * static_cast<double>(s.num_trained) / static_cast<double>(s.num_tokens));
  if (s.num_untrained > 0)
    std::printf("left out %s without a token to train on\n",
                counted(s.num_untrained, "conversation").c_str());
  if (s.num_empty > 0)
    std::printf("left out %s without text\n", counted(s.num_empty, "document").c_str());
  if (s.num_skipped > 0)
    std::printf("skipped %s that could not be read\n", counted(s.num_skipped, "line").c_str());
  return 0;
}

}  // namespace moesh::cli
