#pragma once
// Conversations as tokens, with a mask of those that a model is to predict. A chat template writes
// a conversation as text. Templates are programs for Jinja2, so Python runs them: the package
// gives `set_chat_templates` what does.

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "moesh/data/tokenize_files.h"
#include "moesh/tokenizer/tokenizer.h"

namespace moesh::data {

struct ChatOptions {
  /// auto: what the first line has; messages, prompt_completion, sharegpt, alpaca; none: texts.
  std::string format = "auto";
  std::string tokenizer;                           // whose folder has the template
  std::string template_file;                       // instead of that template; empty: none
  std::vector<std::string> roles = {"assistant"};  // whose turns are trained on
  bool end_of_turn = true;                         // also on the tokens that end a turn
  std::map<std::string, std::string> fields;       // names that a file has for those of its format
  std::map<std::string, std::string> variables;    // of the template

  void validate() const;
};

/// A conversation as its template writes it.
struct RenderedChat {
  std::string text;
  std::vector<tokenizer::ByteRange> trained;  // what a model is to predict, in order
};

struct ChatTemplate {
  /// Renders a line of JSON. Threads may call it at the same time. Throws Error.
  std::function<RenderedChat(const std::string& line)> render;
  /// All that the result depends on besides the line.
  std::string facts;
};

using OpenChatTemplate = std::function<ChatTemplate(const ChatOptions&)>;
/// Sets the function that opens templates in this process.
void set_chat_templates(OpenChatTemplate open);

/// The template, where the inputs are chats: by the options, or because the first line of JSONL has
/// no `text_field`. Nothing where they are texts, or where nothing can open templates.
std::optional<ChatTemplate> find_chat_template(const ChatOptions& options,
                                               const std::vector<TextFile>& files,
                                               const std::string& text_field);

/// Appends 1 for each token that has a part of what is trained, else 0. Without `end_of_turn` the
/// special tokens at the end of a part, and spaces behind them, have 0.
void add_mask(const RenderedChat& chat, const tokenizer::Tokenizer& tokenizer,
              std::span<const tokenizer::TokenId> ids, std::span<const tokenizer::ByteRange> spans,
              bool end_of_turn, std::vector<std::uint8_t>& mask);

}  // namespace moesh::data
