// Chats as tokens and masks, and how a document is shown. The template here is written in C++: a
// line is a text in which what is trained on stands between < and >.

#include "moesh/data/chats.h"

#include <filesystem>

#include "moesh/data/tokenize.h"
#include "moesh/formats/file.h"
#include "moesh/formats/token_file.h"
#include "tests/data/small_tokenizer.h"
#include "tests/support.h"

namespace moesh::data {
namespace {

// The same with "~" as a special token, which ends a turn.
std::string with_special(std::string json) {
  const std::string none = R"("added_tokens":[])";
  return json.replace(
      json.find(none), none.size(),
      R"("added_tokens":[{"id":93,"content":"~","single_word":false,"lstrip":false,)"
      R"("rstrip":false,"normalized":false,"special":true}])");
}

RenderedChat marked_text(const std::string& line) {
  RenderedChat chat;
  for (const char c : line.substr(1, line.size() - 2)) {
    if (c == '<')
      chat.trained.push_back({chat.text.size(), 0});
    else if (c == '>')
      chat.trained.back().end = chat.text.size();
    else
      chat.text += c == '_' ? '\n' : c;
  }
  MOESH_CHECK(chat.text != "bad", ErrorKind::data, "bad is refused");
  return chat;
}

struct TemplatesScope {
  TemplatesScope() {
    set_chat_templates(
        [](const ChatOptions&) { return ChatTemplate{.render = marked_text, .facts = "marked"}; });
  }
  ~TemplatesScope() { set_chat_templates(nullptr); }
};

std::string mask_of(const std::string& line, bool end_of_turn = true) {
  const tokenizer::Tokenizer tokenizer(with_special(small_tokenizer_json()), "test");
  const RenderedChat chat = marked_text("\"" + line + "\"");
  std::vector<tokenizer::TokenId> ids;
  std::vector<tokenizer::ByteRange> spans;
  tokenizer::EncodeBuffers buffers;
  tokenizer.encode(chat.text, false, buffers, ids, &spans);
  std::vector<std::uint8_t> mask{1};  // of what was before
  add_mask(chat, tokenizer, ids, spans, end_of_turn, mask);
  std::string text;
  for (const std::uint8_t m : mask) text += static_cast<char>('0' + m);
  return text.substr(1);
}

TEST(Chats, AMaskHasTheTokensOfWhatIsTrainedOn) {
  EXPECT_EQ(mask_of("ab<cd>e<f>"), "001101");
  EXPECT_EQ(mask_of("abc"), "000");
  EXPECT_EQ(mask_of("<abc>"), "111");
  EXPECT_EQ(mask_of("a<>b"), "00") << "a part of no character has no token";
  // "se" is one token: it is trained on if a part of it is.
  EXPECT_EQ(mask_of("as<e>b"), "010");
  EXPECT_EQ(mask_of("a<s>eb"), "010");
  EXPECT_EQ(mask_of("a<s>e<b>"), "011");
}

TEST(Chats, TheEndOfATurnMayBeLeftOut) {
  EXPECT_EQ(mask_of("a<bc~_>d<e~>", true),
            "0111101"
            "1");
  EXPECT_EQ(mask_of("a<bc~_>d<e~>", false),
            "0110001"
            "0");
  EXPECT_EQ(mask_of("a<b_~~_>", false), "011000") << "what was said may end with a line end";
  EXPECT_EQ(mask_of("a<b_>", false), "011") << "there is no token that ends it";
  EXPECT_EQ(mask_of("a<~>b", false), "000");
  EXPECT_EQ(mask_of("~<~>b", false), "000") << "a turn before it ends with one, too";
  EXPECT_EQ(mask_of("~<_>b", false), "010")
      << "the token that ends a turn before it is not its own";
  EXPECT_EQ(mask_of("a<b~c>", false), "0111") << "it does not end with that token";
}

struct ChatFiles {
  TemporaryFile tokenizer{"tokenizer.json", with_special(small_tokenizer_json())};
  TemporaryFile lines{"chats.jsonl", "{\"a\": 1}\n"};
  std::string folder = std::filesystem::path(lines.path()).parent_path();

  TokenizeOptions options(const std::string& name) const {
    return {.tokenizer = tokenizer.path(),
            .out = folder + "/" + name,
            .inputs = {lines.path()},
            .chats = {.format = "messages"}};
  }
  void write(const std::string& text) const { std::ofstream(lines.path()) << text; }
};

TEST(Chats, BecomeTokensWithAMaskBesideThem) {
  const ChatFiles files;
  const TemplatesScope scope;
  files.write("\"ab<cd>\"\n\n\"nothing\"\n\"bad\"\n\"<a>\"\n\"<xy>\"\n");
  TokenizeOptions options = files.options("out");
  options.skip_errors = true;
  options.end_of_document = "~";
  const auto s = tokenize(options);
  EXPECT_EQ(s.num_documents, 3);
  EXPECT_EQ(s.num_untrained, 1) << "nothing";
  EXPECT_EQ(s.num_skipped, 1) << "bad";
  EXPECT_EQ(s.num_trained, 3 + 2 + 3) << "with the end of each document";
  EXPECT_TRUE(s.has_mask);
  const auto file = formats::TokenFile::open_indexed(files.folder + "/out");
  ASSERT_TRUE(file.has_mask());
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(file.num_tokens()));
  file.copy_mask(0, mask);
  EXPECT_EQ(mask, (std::vector<std::uint8_t>{0, 0, 1, 1, 1, 1, 1, 1, 1, 1}));
  check_token_files(files.folder + "/out");
  options.skip_errors = false;
  options.out += "2";
  expect_parts(error_of([&] { tokenize(options); }, ErrorKind::data),
               {"chats.jsonl:4: ", "bad is refused"});
}

TEST(Chats, WithNothingToTrainOnAreRefused) {
  const ChatFiles files;
  const TemplatesScope scope;
  files.write("\"<a>\"\n\"b\"\n");  // nothing predicts the first token
  expect_parts(error_of([&] { tokenize(files.options("out")); }, ErrorKind::data),
               {"none of the 2 conversations", "--roles"});
}

TEST(Chats, NeedWhatOpensTemplates) {
  const ChatFiles files;
  expect_parts(error_of([&] { tokenize(files.options("out")); }, ErrorKind::config),
               {"--chats is messages", "python -m moesh tokenize"});
  TokenizeOptions options = files.options("out");
  options.chats.format = "auto";
  files.write("{\"messages\": []}\n");
  expect_parts(error_of([&] { tokenize(options); }, ErrorKind::data),
               {"no \"text\" and looks like a chat", "python -m moesh tokenize"});
}

TEST(Chats, AreKnownByTheirFirstLine) {
  const ChatFiles files;
  const TemplatesScope scope;
  TokenizeOptions options = files.options("texts");
  options.chats.format = "auto";
  files.write("\n{\"text\": \"words\"}\n");
  EXPECT_FALSE(tokenize(options).has_mask);
  files.write("\n{\"messages\": \"<abc>\"}\n");
  options.format = "text";
  options.out = files.folder + "/text";
  EXPECT_FALSE(tokenize(options).has_mask) << "text may look like a chat";
  options.format = "auto";
  options.out = files.folder + "/chats";
  EXPECT_TRUE(tokenize(options).has_mask);
  options.chats.format = "none";
  options.out = files.folder + "/none";
  EXPECT_NE(error_of([&] { tokenize(options); }, ErrorKind::data), "");
}

TEST(ShowDocument, MarksWhatIsTrainedOn) {
  const ChatFiles files;
  const TemplatesScope scope;
  files.write("\"ab<cd>e<f>\"\n\"<x_y~>z\"\n");
  tokenize(files.options("out"));
  const std::string first = show_document({.path = files.folder + "/out"});
  expect_parts(first, {"out.bin: 2 documents, 11 tokens, 7 (63.6 %) trained on\n",
                       "document 0: 6 tokens, 3 (50.0 %) trained on\n\nab[[cd]]e[[f]]\n"});
  const std::string second = show_document({.path = files.folder + "/out.bin",
                                            .document = 1,
                                            .tokenizer = files.tokenizer.path(),
                                            .begin_trained = "(",
                                            .end_trained = ")"});
  expect_parts(second, {"document 1: 5 tokens, 4 (80.0 %) trained on\n\n(x\ny~)z\n"});
  expect_parts(error_of([&] { show_document({.path = files.folder + "/out", .document = 2}); },
                        ErrorKind::config),
               {"--document is 2", "has 2, counted from 0"});
  expect_parts(error_of([&] { show_document({.path = files.folder + "/no"}); }, ErrorKind::config),
               {"no.bin with ", "moesh tokenize"});
  std::filesystem::remove(files.folder + "/out.moesh.json");
  expect_parts(error_of([&] { show_document({.path = files.folder + "/out"}); }, ErrorKind::config),
               {"is not known", "--tokenizer"});
}

}  // namespace
}  // namespace moesh::data
