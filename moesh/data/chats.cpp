#include "moesh/data/chats.h"

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/formats/json.h"
#include "moesh/formats/name.h"

namespace moesh::data {
namespace {

const std::vector<std::string> kFormats{"auto",     "messages", "prompt_completion",
                                        "sharegpt", "alpaca",   "none"};

OpenChatTemplate& opener() {
  static OpenChatTemplate open;
  return open;
}

// Whether the first line of the first JSONL file is an object without a text. What is not JSON is
// left to its reader.
bool begins_with_a_chat(const std::vector<TextFile>& files, const std::string& text_field) {
  for (const TextFile& file : files) {
    if (!file.is_jsonl || file.path == "-") continue;
    const std::vector<TextFile> one{file};
    TextReader reader(one, {});
    while (const auto batch = reader.next())
      for (const std::string& line : batch->texts) {
        if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
        try {
          const auto object = formats::parse_json(line, file.path);
          return std::holds_alternative<formats::JsonObject>(object.value) &&
                 object.find(text_field) == nullptr;
        } catch (const Error&) {
          return false;
        }
      }
  }
  return false;
}

}  // namespace

void ChatOptions::validate() const {
  MOESH_CHECK(std::find(kFormats.begin(), kFormats.end(), format) != kFormats.end(),
              ErrorKind::config, "--chats is ", formats::shown(format), "; it takes ",
              joined_by_or(kFormats));
  MOESH_CHECK(!roles.empty() && std::find(roles.begin(), roles.end(), "") == roles.end(),
              ErrorKind::config,
              "--roles names no role, so nothing would be trained on; the default is assistant");
}

void set_chat_templates(OpenChatTemplate open) { opener() = std::move(open); }

std::optional<ChatTemplate> find_chat_template(const ChatOptions& options,
                                               const std::vector<TextFile>& files,
                                               const std::string& text_field) {
  if (options.format == "none") return std::nullopt;
  if (options.format == "auto" && (!opener() || !begins_with_a_chat(files, text_field)))
    return std::nullopt;
  MOESH_CHECK(opener(), ErrorKind::config, "--chats is ", options.format,
              ", and chat templates are programs for Jinja2, which needs Python; run python -m "
              "moesh tokenize with the same arguments");
  for (const TextFile& file : files)
    MOESH_CHECK(
        file.is_jsonl, ErrorKind::config, formats::shown(file.path),
        " is read as text, and chats are lines of JSON; name *.jsonl files, or set --format "
        "jsonl");
  return opener()(options);
}

void add_mask(const RenderedChat& chat, const tokenizer::Tokenizer& tokenizer,
              std::span<const tokenizer::TokenId> ids, std::span<const tokenizer::ByteRange> spans,
              bool end_of_turn, std::vector<std::uint8_t>& mask) {
  const std::size_t before = mask.size();
  mask.resize(before + ids.size(), 0);
  const auto is_space = [&](std::size_t i) {
    const auto text =
        std::string_view(chat.text).substr(spans[i].begin, spans[i].end - spans[i].begin);
    return !tokenizer.is_special(ids[i]) &&
           text.find_first_not_of(" \t\r\n") == std::string_view::npos;
  };
  std::size_t first = 0;
  for (const auto& [begin, end] : chat.trained) {
    if (begin == end) continue;
    while (first < ids.size() && spans[first].end <= begin) ++first;
    std::size_t last = first;
    while (last < ids.size() && spans[last].begin < end) ++last;
    if (!end_of_turn) {
      std::size_t kept = last;
      while (kept > first && is_space(kept - 1)) --kept;
      const bool has_end = kept > first && tokenizer.is_special(ids[kept - 1]);
      while (kept > first && tokenizer.is_special(ids[kept - 1])) --kept;
      if (has_end) last = kept;
    }
    std::fill(mask.begin() + static_cast<std::ptrdiff_t>(before + first),
              mask.begin() + static_cast<std::ptrdiff_t>(before + last), std::uint8_t{1});
  }
}

}  // namespace moesh::data
