// What can be said without the package: small tokenizers whose ids can be worked out by hand, and
// files that are refused. tokenizer_peer.py compares with the package.

#include "moesh/tokenizer/tokenizer.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "moesh/base/error.h"

namespace moesh::tokenizer {
namespace {

using Ids = std::vector<TokenId>;

// "\u0120" stands for a space.
const std::string kModel = R"({"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "Ġ": 3, "ab": 4,
  "bc": 5, "abc": 6, "Ġa": 7}, "merges": [["b", "c"], ["a", "b"], "Ġ a", ["a", "bc"]]})";
const std::string kByteLevel =
    R"({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})";
const std::string kEnd = R"({"id": 8, "content": "<end>", "single_word": false, "lstrip": false,
  "rstrip": false, "normalized": false, "special": true})";

std::string file(const std::string& changes = "", const std::string& model = kModel,
                 const std::string& added = kEnd) {
  return R"({"version": "1.0", "added_tokens": [)" + added + R"(], "pre_tokenizer": )" +
         kByteLevel + changes + R"(, "model": )" + model + "}";
}

Ids encode(const std::string& json, std::string_view text) {
  return Tokenizer(json, "tokenizer.json").encode(text);
}

TEST(Tokenizer, MergesWhatWasLearnedFirst) {
  // b and c before a and b; then a and bc.
  EXPECT_EQ(encode(file(), "abc"), (Ids{6}));
  EXPECT_EQ(encode(file(), "ab"), (Ids{4}));
  EXPECT_EQ(encode(file(), "abab abc"), (Ids{4, 4, 7, 5}));
  EXPECT_EQ(encode(file(), ""), Ids{});
}

TEST(Tokenizer, MergesAShortWordAndALongOneAlike) {
  const Tokenizer tokenizer(file(), "tokenizer.json");
  for (const std::string unit : {"abc", "abcb", "cab", "abbc"}) {
    const Ids once = tokenizer.encode(unit + unit + unit);
    std::string many;
    for (int i = 0; i < 300; ++i) many += unit;
    // Units of the middle repeat, whatever happens at the ends.
    const Ids all = tokenizer.encode(many);
    std::string decoded;
    for (const TokenId id : all) decoded += tokenizer.token(id);
    EXPECT_EQ(decoded, many);
    EXPECT_EQ(Ids(all.begin(), all.begin() + 2), Ids(once.begin(), once.begin() + 2)) << unit;
  }
}

TEST(Tokenizer, FindsAddedTokensAndAddsTheTemplate) {
  EXPECT_EQ(encode(file(), "ab<end>c"), (Ids{4, 8, 2}));
  const std::string with_template = file(R"(, "post_processor": {"type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "<end>", "type_id": 0}}, {"Sequence": {"id": "A",
      "type_id": 0}}], "pair": [], "special_tokens": {"<end>": {"id": "<end>", "ids": [8],
      "tokens": ["<end>"]}}})");
  const Tokenizer tokenizer(with_template, "tokenizer.json");
  EXPECT_EQ(tokenizer.encode("ab"), (Ids{8, 4}));
  EXPECT_EQ(tokenizer.encode("ab", /*with_template=*/false), (Ids{4}));
  EXPECT_EQ(tokenizer.vocab_size(), 9);
  EXPECT_EQ(tokenizer.find("<end>"), 8);
  EXPECT_EQ(tokenizer.find("abc"), 6);
  EXPECT_EQ(tokenizer.find("x"), std::nullopt);
}

TEST(Tokenizer, DecodesWithAndWithoutSpecialTokens) {
  const Tokenizer tokenizer(file(R"(, "decoder": {"type": "ByteLevel"})"), "tokenizer.json");
  EXPECT_EQ(tokenizer.decode(Ids{7, 1, 8, 2, 77, -1}), " ab<end>c");
  EXPECT_EQ(tokenizer.decode(Ids{7, 1, 8, 2}, /*skip_special=*/true), " abc");
}

TEST(Tokenizer, KeepsTheIdsOfAWordWhateverCameBefore) {
  const Tokenizer tokenizer(file(), "tokenizer.json");
  EncodeBuffers buffers;
  for (int i = 0; i < 3; ++i)
    for (const char* text : {"abc ab", "cab", "bca abc b"}) {
      Ids ids;
      tokenizer.encode(text, true, buffers, ids);
      EXPECT_EQ(ids, tokenizer.encode(text)) << text;
    }
}

TEST(Tokenizer, RefusesATextThatIsNotUtf8) {
  try {
    encode(file(), "ab\xFF");
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "byte 2 of the text is not UTF-8");
  }
}

TEST(Tokenizer, IsReadFromAFileOrFromItsFolder) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "moesh_tokenizer";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "tokenizer.json") << file();
  EXPECT_EQ(Tokenizer::read(folder).encode("abc"), (Ids{6}));
  EXPECT_EQ(Tokenizer::read(folder / "tokenizer.json").encode("abc"), (Ids{6}));
  EXPECT_THROW(Tokenizer::read(folder / "other.json"), Error);
  std::filesystem::remove_all(folder);
}

struct Bad {
  std::string json, reason;
};

TEST(Tokenizer, NamesWhatItDoesNotKnow) {
  const auto model = [](const std::string& more) {
    return R"({"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [])" + more + "}";
  };
  const auto token = [](const std::string& id, const std::string& content) {
    return R"({"id": )" + id + R"(, "content": ")" + content +
           R"(", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
             "special": true})";
  };
  const std::vector<Bad> all{
      {"", "is not JSON"},
      {"[]", "tokenizer.json"},
      {"{}", "\"tokenizer.json\" has no \"model\""},
      {file(R"(, "normalizer": {"type": "NFKC"})"),
       "normalizer: moesh does not know the type \"NFKC\""},
      {file(R"(, "normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]})"),
       "normalizer.normalizers[0]: moesh does not know the type \"Lowercase\""},
      {file(R"(, "decoder": {"type": "CTC"})"), "decoder: moesh does not know the type \"CTC\""},
      {file(R"(, "post_processor": {"type": "BertProcessing"})"), "\"BertProcessing\""},
      {file(R"(, "truncation": {"max_length": 8})"), "truncation is set"},
      {file(R"(, "padding": {"pad_id": 8})"), "padding is set"},
      {file(R"(, "new_key": 1)"), "\"new_key\""},
      {file("", R"({"type": "Unigram", "vocab": []})"), "\"Unigram\""},
      {file("", model(R"(, "dropout": 0.1)")), "dropout"},
      {file("", model(R"(, "end_of_word_suffix": "</w>")")), "end_of_word_suffix is \"</w>\""},
      {file("", model(R"(, "unk_token": "?")")), "unk_token is \"?\""},
      {file("", R"({"vocab": {"a": 0, "b": 0}, "merges": []})"), "two tokens have the id 0"},
      {file("", R"({"vocab": {"a": -1}, "merges": []})"), "has the id -1"},
      {file("", R"({"vocab": {"a": 0}, "merges": ["a b"]})"), "\"b\" is not in the vocabulary"},
      {file("", R"({"vocab": {"a": 0}, "merges": ["a a"]})"), "\"aa\" is not in the vocabulary"},
      {file("", R"({"vocab": {"a": 0}, "merges": ["a"]})"), "merges[0] is \"a\""},
      {file("", R"({"vocab": {"a": 0}, "merges": [["a"]]})"), "has 1 texts"},
      {file("", kModel, token("9", "<x>")), "\"<x>\" has the id 9"},
      {file("", kModel, token("1", "abc")), "\"abc\" has the id 1"},
      {file("", kModel, token("8", "")), "content is empty"},
      {file("", kModel, kEnd + "," + kEnd), "twice"},
      {R"({"pre_tokenizer": {"type": "BertPreTokenizer"}, "model": )" + kModel + "}",
       "pre_tokenizer: moesh does not know the type \"BertPreTokenizer\""},
      {R"({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\bx"}, "behavior": "Removed",
         "invert": false}, "model": )" +
           kModel + "}",
       "pre_tokenizer.pattern"},
      {R"({"pre_tokenizer": {"type": "Split", "pattern": {"String": "x"}, "behavior": "Kept",
         "invert": false}, "model": )" +
           kModel + "}",
       "the behavior \"Kept\""},
      {R"({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [)" + kByteLevel + "," +
           kByteLevel + R"(]}, "model": )" + kModel + "}",
       "ByteLevel must come last"},
  };
  for (const Bad& bad : all) try {
      const Tokenizer tokenizer(bad.json, "tokenizer.json");
      ADD_FAILURE() << bad.json << " was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::data) << e.what();
      EXPECT_NE(std::string(e.what()).find(bad.reason), std::string::npos) << e.what();
    }
}

}  // namespace
}  // namespace moesh::tokenizer
