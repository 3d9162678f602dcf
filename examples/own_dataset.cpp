// A model of your own data: sums such as "12+7=19;" one behind the other, made as they are asked
// for. A sample depends only on its index, so every mesh sees the same ones, and a run that goes
// on from a checkpoint goes on with the next.
//
//   own_dataset [--steps=200] [--mesh=dp_shard=2,tp=2] [any other option of moesh train]

#include <cstdio>
#include <string>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/base/random.h"
#include "moesh/config/merge.h"
#include "moesh/train/loop.h"

namespace {

using namespace moesh;

class Sums : public data::Dataset {
 public:
  explicit Sums(std::int64_t sequence_length) : sequence_length_(sequence_length) {}

  data::Sample get(std::int64_t index) const override {
    const Random random(0, "sums of sample " + std::to_string(index));
    data::Sample sample;
    for (std::uint64_t sum = 0; std::ssize(sample.tokens) <= sequence_length_; ++sum) {
      const auto a = random.bits(2 * sum) % 20, b = random.bits(2 * sum + 1) % 20;
      const std::string text =
          std::to_string(a) + "+" + std::to_string(b) + "=" + std::to_string(a + b) + ";";
      for (const char c : text) {
        sample.tokens.push_back(static_cast<data::TokenId>(kLetters.find(c)));
        sample.documents.push_back(static_cast<std::int64_t>(sum));
      }
    }
    sample.tokens.resize(static_cast<std::size_t>(sequence_length_ + 1));
    sample.documents.resize(sample.tokens.size());
    return sample;
  }
  std::int64_t sequence_length() const override { return sequence_length_; }
  std::int64_t vocab_size() const override { return std::ssize(kLetters); }
  // A checkpoint remembers this, and tells other data by it.
  std::string describe() const override { return "sums of two numbers below 20"; }

 private:
  static constexpr std::string_view kLetters = "0123456789+=;";
  std::int64_t sequence_length_;
};

}  // namespace

int main(int argc, char** argv) try {
  // Sums are documents: with a mask none sees another.
  std::vector<std::string> args{"--steps=100",         "--data.sequence_length=32",
                                "--data.batch_size=8", "--optimizer.lr=1e-2",
                                "--metrics.folder=",   "--data.document_mask=true"};
  args.insert(args.end(), argv + 1, argv + argc);
  const config::Config config = config::load_config(args);
  const auto summary = train::train(config, Sums(config.data.sequence_length));
  std::printf("loss %.3f after the first step, %.3f after the last\n", summary.losses.front(),
              summary.losses.back());
  return summary.losses.back() < summary.losses.front() ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
