#include "moesh/data/tokenize.h"

#include <sys/stat.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <thread>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/base/text.h"
#include "moesh/formats/checksum.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"
#include "moesh/tokenizer/tokenizer.h"

namespace moesh::data {
namespace {

using formats::file_system;

// A name that another text, tokenizer or ending does not have.
std::string name_of(const TokenizedText& text, const std::string& tokenizer_json,
                    const std::string& end_of_document) {
  struct stat status{};
  if (file_system().status(text.path, status) != 0) formats::fail_at(text.path, "read", errno);
  const std::string facts =
      detail::concat(std::filesystem::absolute(text.path).lexically_normal().string(), " ",
                     status.st_size, " ", status.st_mtime, " ", text.kind, " ", end_of_document,
                     " ", formats::checksum_text(formats::hash_block(tokenizer_json)));
  return std::filesystem::path(text.path).stem().string() + "-" +
         formats::checksum_text(formats::hash_block(facts));
}

}  // namespace

formats::TokenFile open_tokenized(const TokenizedText& text) {
  MOESH_CHECK(!text.folder.empty(), ErrorKind::config, "data: ", text.path,
              " is to become tokens of ", text.tokenizer,
              ", and data.token_folder, where they are kept, is empty; name a folder");
  const std::string file = tokenizer::file_of(text.tokenizer).string();
  const std::string json = formats::read_file(file, ErrorKind::config);
  const auto num_words = tokenizer::Tokenizer(json, file).vocab_size();
  MOESH_CHECK(num_words <= text.vocab_size, ErrorKind::config, "data.tokenizer is ", text.tokenizer,
              ", which has ", num_words, " tokens, and the vocabulary of the model has ",
              text.vocab_size, "; set model.vocab_size to ", num_words,
              " or more, or name the tokenizer of this model");
  const std::string end_of_document = find_end_of_document(text.tokenizer);
  std::filesystem::create_directories(text.folder);
  const std::string prefix =
      (std::filesystem::path(text.folder) / name_of(text, json, end_of_document)).string();
  // Held by the process that makes the ids; the others wait.
  using formats::OutputFile;
  const std::string lock = prefix + ".lock";
  OutputFile turn(lock, OutputFile::Mode::open_or_create);
  for (bool is_told = false; !turn.lock(); is_told = true) {
    if (!is_told) log_info("another process makes the tokens of '", lock, "': waiting for it");
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  if (!formats::exists(prefix + ".moesh.json")) {
    log_info("making tokens of ", text.path, " in ", prefix, ".bin");
    const auto made = tokenize({.tokenizer = text.tokenizer,
                                .out = prefix,
                                .inputs = {text.path},
                                .format = text.kind,
                                .end_of_document = end_of_document,
                                .chats = {.format = "none"},
                                .show_progress = true});
    log_info(text.path, ": ", with_commas(made.num_documents), " documents, ",
             with_commas(made.num_tokens), " tokens, ", made.seconds, " s");
  }
  return formats::TokenFile::open_indexed(prefix);
}

}  // namespace moesh::data
