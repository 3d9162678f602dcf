// Training on data of the caller's own: which samples a run takes, in order, and also where it goes
// on from a checkpoint on another mesh.

#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "moesh/data/dataset.h"
#include "tests/checkpoint/support.h"
#include "tests/support.h"

namespace moesh::train {
namespace {

// Remembers what was asked for.
class Counting : public data::Dataset {
 public:
  data::Sample get(std::int64_t index) const override {
    const std::lock_guard lock(mutex_);
    seen_.insert(index);
    data::Sample sample{.documents = std::vector<std::int64_t>(9, 0)};
    for (std::int64_t t = 0; t < 9; ++t)
      sample.tokens.push_back(static_cast<data::TokenId>((index * 7 + t) % 50));
    return sample;
  }
  std::int64_t sequence_length() const override { return 8; }
  std::int64_t vocab_size() const override { return 50; }
  std::string describe() const override { return "sevens"; }

  /// Sample by sample, how often since the last time.
  std::multiset<std::int64_t> take_seen() { return std::exchange(seen_, {}); }

 private:
  mutable std::mutex mutex_;
  mutable std::multiset<std::int64_t> seen_;
};

std::multiset<std::int64_t> range(std::int64_t first, std::int64_t end) {
  std::multiset<std::int64_t> all;
  for (; first < end; ++first) all.insert(first);
  return all;
}

// Two sequences a dp rank and step: 3 steps on two of them take 12, and 4 more on one take 8.
TEST(OwnDataset, EachSampleIsSeenOnceAlsoAfterAResumeOnAnotherMesh) {
  const TemporaryFolder folder;
  Counting data;
  const auto first = train(run_config(folder.path() / "c", "dp_shard=2", {"--steps=3"}), data);
  EXPECT_EQ(first.losses.size(), 3u);
  EXPECT_EQ(data.take_seen(), range(0, 12));
  const auto second = train(run_config(folder.path() / "c", "tp=1", {"--steps=7"}), data);
  EXPECT_EQ(second.first_step, 3);
  EXPECT_EQ(data.take_seen(), range(12, 20));
  const auto third = train(run_config(folder.path() / "c", "dp_replicate=3", {"--steps=8"}), data);
  EXPECT_EQ(third.first_step, 7);
  EXPECT_EQ(data.take_seen(), range(20, 26));
}

class Others : public Counting {
 public:
  std::string describe() const override { return "others"; }
};

TEST(OwnDataset, OtherDataIsNoticed) {
  const TemporaryFolder folder;
  const auto config = [&](const std::string& steps) {
    return run_config(folder.path() / "c", "tp=1", {"--steps=" + steps});
  };
  train(config("1"), Counting());
  expect_parts(error_of([&] { train(config("2"), Others()); }, ErrorKind::config),
               {"data.fingerprint was sevens and is others"});
}

TEST(OwnDataset, MustFitTheConfiguration) {
  const auto error = [](const Args& args) {
    return error_of([&] { train(config::load_config(args), Counting()); }, ErrorKind::config);
  };
  expect_parts(error({"--data.sequence_length=7"}), {"sevens", "sequences of 8", "is 7"});
  expect_parts(error({"--data.sequence_length=8", "--model.vocab_size=49"}),
               {"50 different tokens", "has 49", "model.vocab_size to 50"});
  const TemporaryFile text("a.txt", "text");
  expect_parts(
      error({"--data.sequence_length=8", "--model.vocab_size=257", "--data.path=" + text.path()}),
      {"leave out data.path"});
}

}  // namespace
}  // namespace moesh::train
