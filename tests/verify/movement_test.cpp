// verify sees an update that is left out or made twice, in every dtype: of a parameter, of one
// expert, of one rank's shard. The values are those of a real run, the faults are made here.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moesh/verify/verify.h"
#include "tests/train/device.h"

namespace moesh::verify {
namespace {

struct TwoSteps {
  VerifyCase c;
  VerifyReference reference;
  std::vector<RankTensor> movements;  // of one rank: those of the reference
};

TwoSteps run(const std::string& model, const std::string& dtype) {
  config::Settings settings = verify_defaults(2);
  for (const auto& s : test_settings()) settings.push_back(s);
  settings.push_back({"model.name", model, {"test"}});
  settings.push_back({"training.dtype", dtype, {"test"}});
  TwoSteps r{.c = {config::merged(settings)}, .reference = {}, .movements = {}};
  r.reference = run_reference(r.c);
  const auto data = open_data(r.c);
  const auto world = comm::solo_group();
  run_steps(r.c, *data, *world, nullptr, r.c.replays() ? &r.reference.routing : nullptr,
            [&](const RankTensor& t) {
              if (t.movement) r.movements.push_back(t);
            });
  return r;
}

// What verify says of this rank's movement alone.
std::vector<Mismatch> judged(const TwoSteps& r, const RankTensor& tensor) {
  NamedTensors only{.tensors = {{tensor.name, r.reference[tensor.name]}},
                    .wide = r.reference.wide,
                    .gradients = r.reference.gradients};
  std::erase_if(only.wide, [&](const auto& t) { return t.first != tensor.name; });
  Findings findings(1, only, r.c.tolerance());
  findings.compare(tensor, 0);
  return findings.mismatches({});
}

class MovementTest : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, MovementTest, testing::Values("float64", "float32", "bfloat16"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(MovementTest, SeesWhatIsLeftOutOrMadeTwice) {
  const TwoSteps r = run("deepseek_v3", GetParam());
  ASSERT_GT(r.movements.size(), 30u);
  for (const RankTensor& right : r.movements) {
    EXPECT_TRUE(judged(r, right).empty()) << right.name;
    for (const double factor : {0.0, 2.0, -1.0}) {
      RankTensor wrong = right;
      wrong.value = right.value * factor;
      const auto found = judged(r, wrong);
      ASSERT_EQ(found.size(), 1u) << right.name << " times " << factor;
      EXPECT_NEAR(found[0].factors[0], factor, 1e-2) << right.name;
    }
  }
}

TEST_P(MovementTest, SeesOneExpertThatStays) {
  const TwoSteps r = run("gpt_oss", GetParam());
  int num_experts = 0;
  for (const RankTensor& right : r.movements) {
    if (!right.movement->by_expert) continue;
    for (std::int64_t e = 0; e < right.value.size(0); ++e) {
      // A bias does not decay: of an expert without tokens it stays where it was.
      if (r.reference[right.name][e].count_nonzero().item<std::int64_t>() == 0) continue;
      RankTensor wrong = right;
      wrong.value = right.value.clone();
      wrong.value[e].zero_();
      EXPECT_FALSE(judged(r, wrong).empty()) << right.name << ", expert " << e;
      ++num_experts;
    }
  }
  EXPECT_GT(num_experts, 100);
}

// A rank has one eighth of the rows, and they stay: beside the whole it is little.
TEST_P(MovementTest, SeesOneShardThatStays) {
  const TwoSteps r = run("qwen3_moe", GetParam());
  for (const RankTensor& right : r.movements) {
    const std::int64_t rows = right.value.size(0), length = rows / 8;
    if (length == 0 || right.value.numel() < 8 * 16) continue;  // of a few, rounding decides
    for (std::int64_t start = 0; start + length <= rows; start += length) {
      RankTensor wrong = right;
      wrong.value = at::zeros_like(right.value.narrow(0, start, length));
      wrong.place = [=](const at::Tensor& t) { return t.narrow(0, start, length); };
      EXPECT_FALSE(judged(r, wrong).empty()) << right.name << ", rows from " << start;
    }
  }
}

}  // namespace
}  // namespace moesh::verify
