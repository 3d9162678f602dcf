// The checks that mistakes in loss masks must not pass: of documents whose every second token is to
// be predicted, those tokens are the labels; and of a chat, the tokens of its answers have a mask.

#include "moesh/base/error.h"
#include "moesh/data/chats.h"
#include "moesh/data/packed.h"
#include "tests/data/small_tokenizer.h"
#include "tests/mutants/check.h"

namespace moesh::data {
namespace {

using mutants::Check;
using mutants::Settings;

// Documents of 6 tokens, numbered from 1 on; the even ones are to be predicted.
class EvenTokens : public TokenStore {
 public:
  const std::string& name() const override { return name_; }
  const char* unit() const override { return "tokens"; }
  std::int64_t vocab_size() const override { return 100; }
  std::int64_t num_tokens() const override { return 37; }
  std::int64_t num_documents() const override { return 7; }
  std::int64_t start(std::int64_t document) const override { return 6 * document; }
  void copy(std::int64_t begin, std::span<TokenId> to) const override {
    for (std::size_t i = 0; i < to.size(); ++i)
      to[i] = static_cast<TokenId>(begin + 1 + static_cast<std::int64_t>(i));
  }
  bool has_mask() const override { return true; }
  void copy_mask(std::int64_t begin, std::span<std::uint8_t> to) const override {
    for (std::size_t i = 0; i < to.size(); ++i)
      to[i] = (begin + 1 + static_cast<std::int64_t>(i)) % 2 == 0;
  }

 private:
  std::string name_ = "even tokens";
};

std::string wrong_label(const Dataset& data) {
  const Batch batch = make_batch(data, 0, *data.size());
  const auto* labels = batch.labels_BL.const_data_ptr<std::int64_t>();
  std::int64_t num = 0;
  for (std::int64_t i = 0; i < batch.labels_BL.numel(); ++i) {
    if (labels[i] == kIgnoredLabel) continue;
    ++num;
    if (labels[i] % 2 != 0) return detail::concat("labels: ", labels[i], " is only read");
  }
  return num == 18 ? "" : detail::concat("labels: ", num, " and not 18");
}

const mutants::Provide masks("masks", [](Settings&) -> Check {
  return []() -> std::string {
    const auto store = std::make_shared<EvenTokens>();
    for (const std::int64_t length : {4, 9}) {
      const std::string wrong = wrong_label(PackedDataset(store, length, 0, true));
      if (!wrong.empty()) return wrong;
      const std::string other = wrong_label(BestFitDataset(store, length, 0, true));
      if (!other.empty()) return other;
    }
    return "";
  };
});

const mutants::Provide chat_masks("chat_masks", [](Settings&) -> Check {
  return []() -> std::string {
    const tokenizer::Tokenizer tokenizer(small_tokenizer_json(), "test");
    const RenderedChat chat{.text = "ask:yes;ask:no;", .trained = {{4, 8}, {12, 15}}};
    tokenizer::EncodeBuffers buffers;
    std::vector<tokenizer::TokenId> ids;
    std::vector<tokenizer::ByteRange> spans;
    tokenizer.encode(chat.text, false, buffers, ids, &spans);
    std::vector<std::uint8_t> mask;
    add_mask(chat, tokenizer, ids, spans, /*end_of_turn=*/true, mask);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto at = spans[i].begin;
      const bool is_answer = (at >= 4 && at < 8) || at >= 12;
      if (mask[i] != is_answer) return detail::concat("mask of token ", i, " is ", int{mask[i]});
    }
    return "";
  };
});

}  // namespace
}  // namespace moesh::data
