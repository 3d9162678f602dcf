// The command that shows what a model says.

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/checkpoint/folder.h"
#include "moesh/cli/commands.h"
#include "moesh/cli/memory_errors.h"
#include "moesh/config/merge.h"
#include "moesh/data/tokenize.h"
#include "moesh/formats/file.h"
#include "moesh/formats/json.h"
#include "moesh/formats/name.h"
#include "moesh/generate/generate.h"
#include "moesh/kernels/memory.h"
#include "moesh/tokenizer/tokenizer.h"

namespace moesh::cli {
namespace {

using Ids = std::vector<std::int64_t>;

constexpr const char* kBytes = "bytes";
constexpr std::int64_t kDefaultTokens = 64;

// The folder itself, or the newest checkpoint of a run's folder.
std::filesystem::path model_folder(const std::filesystem::path& folder, const Arguments& given) {
  formats::refuse_hub_name(folder.string());
  MOESH_CHECK(formats::exists(folder), ErrorKind::config, "there is no '", folder.string(), "'; ",
              given.usage());
  MOESH_CHECK(formats::is_folder(folder), ErrorKind::config, "'", folder.string(),
              "' is not a folder; name the one that holds config.json and the weights");
  if (formats::exists(folder / "config.json")) return folder;
  const auto steps = checkpoint::saved_steps(folder);
  MOESH_CHECK(!steps.empty(), ErrorKind::config, "'", folder.string(),
              "' has neither a config.json nor a checkpoint (step-...) in it; name a folder that "
              "holds a model");
  return folder / checkpoint::step_name(steps.back());
}

Ids read_ids(const std::string& text) {
  Ids ids;
  for (const char *at = text.data(), *end = at + text.size(); at < end;) {
    std::int64_t id = 0;
    const auto [after, error] = std::from_chars(at, end, id);
    MOESH_CHECK(error == std::errc{} && id >= 0 && (after == end || *after == ','),
                ErrorKind::config, "--prompt-ids is '", text,
                "'; it takes whole numbers with commas between them, as in --prompt-ids 1,2,3");
    ids.push_back(id);
    at = after == end ? end : after + 1;
  }
  return ids;
}

std::optional<formats::JsonValue> read_if_there(const std::filesystem::path& file) {
  if (!formats::exists(file)) return std::nullopt;
  return formats::read_json(file.string());
}

// Texts as the model's tokens; without a tokenizer a token is a byte, as `train` reads a text.
class TextTokens {
 public:
  explicit TextTokens(const std::string& path) {
    if (path != kBytes) tokenizer_.emplace(tokenizer::Tokenizer::read(path));
  }
  Ids encode(const std::string& text) const {
    Ids ids;
    if (!tokenizer_)
      for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
    else
      for (const auto id : tokenizer_->encode(text)) ids.push_back(id);
    return ids;
  }
  std::string decode(const Ids& ids) const {
    if (tokenizer_) {
      std::vector<tokenizer::TokenId> all(ids.begin(), ids.end());
      return tokenizer_->decode(all, /*skip_special=*/true);
    }
    std::string text;
    for (const auto id : ids)
      if (id < 256) text += static_cast<char>(id);
    return text;
  }
  std::optional<std::int64_t> find(const std::string& token) const {
    const auto id = tokenizer_ ? tokenizer_->find(token) : std::nullopt;
    return id ? std::optional<std::int64_t>(*id) : std::nullopt;
  }

 private:
  std::optional<tokenizer::Tokenizer> tokenizer_;
};

// eos_token_id: one, several or none.
std::set<std::int64_t> ids_of(const formats::JsonValue& value, const std::string& what) {
  std::set<std::int64_t> ids;
  if (value.is_null()) return ids;
  if (!std::holds_alternative<formats::JsonList>(value.value)) return {value.as_int(what)};
  for (const auto& id : value.as_list(what)) ids.insert(id.as_int(what));
  return ids;
}

// The tokens that end a text: as the model's library finds them, or the tokenizer's.
std::set<std::int64_t> end_ids(const std::filesystem::path& folder, const std::string& tokenizer,
                               const std::optional<TextTokens>& words) {
  for (const char* name : {"generation_config.json", "config.json"}) {
    const auto file = read_if_there(folder / name);
    const auto* ids = file ? file->find("eos_token_id") : nullptr;
    if (ids && !ids->is_null()) return ids_of(*ids, detail::concat(name, ": eos_token_id"));
  }
  const std::string token = words ? data::find_end_of_document(tokenizer) : "";
  const auto id = token.empty() ? std::nullopt : words->find(token);
  return id ? std::set<std::int64_t>{*id} : std::set<std::int64_t>{};
}

std::optional<TextTokens> find_words(const std::filesystem::path& folder,
                                     const std::optional<std::string>& asked, bool is_needed) {
  if (asked) return TextTokens(*asked);
  if (formats::exists(folder / "tokenizer.json")) return TextTokens(folder.string());
  MOESH_CHECK(!is_needed, ErrorKind::config, "'", folder.string(),
              "' has no tokenizer.json; name one with --tokenizer PATH, write --tokenizer ", kBytes,
              " for a model whose tokens are bytes, or give ids: --prompt-ids 1,2,3");
  return std::nullopt;
}

std::string joined(const Ids& ids) {
  std::string text;
  for (const auto id : ids) text += (text.empty() ? "" : ",") + std::to_string(id);
  return text;
}

}  // namespace

int run_generate(const Arguments& given) {
  const auto prompt = given.text("--prompt"), prompt_ids = given.text("--prompt-ids"),
             tokenizer = given.text("--tokenizer");
  generate::GenerateOptions options{
      .max_new_tokens = given.number("--max-new-tokens", 0),
      .choose = {.temperature = given.real("--temperature", 0),
                 .top_p = given.real("--top-p", 1),
                 .seed = static_cast<std::uint64_t>(given.number("--seed", 0, 0))}};
  options.choose.validate();
  const bool ignores_eos = given.has("--ignore-eos");
  Args args = given.rest();
  MOESH_CHECK(!args.empty() && !args[0].starts_with("--"), ErrorKind::config,
              "generate needs the folder of a model; ", given.usage());
  MOESH_CHECK(prompt.has_value() != prompt_ids.has_value(), ErrorKind::config,
              "generate takes --prompt TEXT or --prompt-ids 1,2,3, and one of them; ",
              given.usage());
  const auto folder = model_folder(args[0], given);
  args.erase(args.begin());
  args.insert(args.begin(), "--model=hf:" + folder.string());
  // One sequence, as long as it becomes: the sizes of batches are nothing to it.
  const config::Origin origin{"generate's default", true};
  const auto config = config::load_config(args, {{"data.sequence_length", std::int64_t{1}, origin},
                                                 {"data.batch_size", std::int64_t{1}, origin}});
  MOESH_CHECK(!config.checkpoint.initial_load.empty(), ErrorKind::config, "'", folder.string(),
              "' has a config.json and no *.safetensors: there are no weights to generate with");

  const auto words = find_words(folder, tokenizer, prompt.has_value());
  options.prompt = prompt ? words->encode(*prompt) : read_ids(*prompt_ids);
  if (options.max_new_tokens == 0) {  // not set: as many as the model has positions for
    const std::int64_t room =
        models::facts(config.model.architecture).max_sequence - std::ssize(options.prompt) + 1;
    options.max_new_tokens = std::clamp<std::int64_t>(room, 1, kDefaultTokens);
  }
  if (!ignores_eos) options.stop = end_ids(folder, tokenizer.value_or(folder.string()), words);
  if (config.training.device == "cpu") kernels::keep_freed_memory();
  generate::Generated done;
  naming_sizes(config, [&] { done = generate::generate(config, options); });
  if (done.ids.empty()) return 0;  // another process has rank 0
  // The prompt and what follows, as text or as ids; a text has no end token.
  Ids all = options.prompt;
  all.insert(all.end(), done.ids.begin(), done.ids.end());
  if (prompt && done.has_stopped) all.pop_back();
  std::string text = prompt ? words->decode(all) : joined(all);
  if (::isatty(STDOUT_FILENO) != 0) text = for_terminal(text);
  text += '\n';
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
  const auto num_later = static_cast<double>(done.ids.size()) - 1;
  std::fprintf(stderr, "prompt of %zu tokens in %.3f s, %zu new tokens%s", options.prompt.size(),
               done.prompt_seconds, done.ids.size(),
               done.has_stopped ? " (up to the end of the text)" : "");
  if (num_later > 0 && done.seconds > 0)
    std::fprintf(stderr, ", %.1f a second", num_later / done.seconds);
  std::fprintf(stderr, "\n");
  return 0;
}

}  // namespace moesh::cli
