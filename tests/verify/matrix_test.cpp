// Choices that a model makes and a configuration can change, on whole models: on which side of the
// experts scores are, and the expert bias.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>

#include "moesh/verify/verify.h"
#include "tests/tier.h"

namespace moesh::verify {
namespace {

using Args = std::vector<std::string>;

VerifyCase case_of(Args args, const Args& more) {
  args.insert(args.end(), more.begin(), more.end());
  args.emplace_back("--dtype=float64");
  return {load_config(args, verify_defaults(2))};
}

double loss(const VerifyReference& r) { return r["step 1 loss"].item<double>(); }

class Matrix : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, Matrix, testing::ValuesIn(models::model_names()),
                         [](const auto& info) { return info.param; });

// Without and with etp over the tp ranks, each way of dispatch, with and without shared experts
// where the model has them, with and without sequence parallelism.
TEST_P(Matrix, ScoresBeforeAndAfterHoldOnWholeModels) {
  const std::string side = "--moe.score_before_experts=";
  std::vector<Args> variants{{}};
  if (GetParam() == "deepseek_v3") variants.push_back({"--model.num_shared=0"});
  for (Args args : variants) {
    args.push_back("--model=" + GetParam() + ":tiny");
    const auto before = run_reference(case_of(args, {side + "true"})),
               after = run_reference(case_of(args, {side + "false"})),
               own = run_reference(case_of(args, {}));
    EXPECT_NE(loss(before), loss(after));
    EXPECT_EQ(loss(own), loss(GetParam() == "llama4" ? before : after));
    size_t number = GetParam().size();  // in `make test` a quarter, others for other models
    for (const char* mesh : {"tp=2", "tp=2,etp=2", "tp=2,ep=2", "tp=4,ep=2,etp=2"})
      for (const char* sequence_parallel : {"true", "false"})
        for (const bool is_before : {true, false}) {
          if (!is_long() && ++number % 5 != 0) continue;
          const auto c =
              case_of(args, {std::string("--mesh=") + mesh, side + (is_before ? "true" : "false"),
                             std::string("--parallelism.sequence_parallel=") + sequence_parallel});
          const auto report = verify(c, is_before ? before : after);
          EXPECT_TRUE(report.holds())
              << args[0] << " before " << is_before << " sequence_parallel " << sequence_parallel
              << ": " << report.describe(mesh_shape(c.config));
        }
  }
}

// A global batch of eight sequences in other pieces than those of one rank, with every loss, labels
// that do not count and an expert bias; and what is not the same then is seen.
TEST_P(Matrix, OneGlobalBatchIsTheSameHoweverItIsCut) {
  struct Cut {
    const char *mesh, *batch;
  };
  const auto of = [&](const Cut& cut, const char* over) {
    return case_of(
        {"--model=" + GetParam() + ":tiny", "--training.global_batch_size=8"},
        {std::string("--mesh=") + cut.mesh, std::string("--data.batch_size=") + cut.batch,
         std::string("--moe.balance_over=") + over});
  };
  std::map<std::int64_t, VerifyReference> references;  // by micro-batches of one rank
  for (const Cut& cut : {Cut{"tp=1", "8"}, Cut{"dp_shard=2,tp=2,ep=2", "1"}, Cut{"dp_shard=8", "1"},
                         Cut{"pp=2,dp_shard=2", "1"}}) {
    const VerifyCase c = of(cut, "sequence");
    const auto num_micro = num_micro_batches(one_rank(c.config));
    ASSERT_NE(num_micro_batches(c.config), num_micro);
    if (!references.contains(num_micro)) references.emplace(num_micro, run_reference(c));
    const auto report = verify(c, references.at(num_micro));
    EXPECT_TRUE(report.holds()) << report.describe(mesh_shape(c.config));
  }
  const Cut whole{"tp=1", "8"}, single{"tp=1", "1"};
  const auto report = verify(of(single, "micro_batch"), run_reference(of(whole, "micro_batch")));
  ASSERT_FALSE(report.holds());
  EXPECT_EQ(report.mismatches[0].tensor, "step 0 total loss");
}

// The bias of every model moves, by the step that was asked for, and without one it stays where it
// is.
TEST_P(Matrix, TheExpertBiasIsAnOptInOfEveryModel) {
  const auto bias_after_one_step = [&](const std::string& coeff) {
    VerifyCase c = case_of({"--model=" + GetParam() + ":tiny"},
                           {"--mesh=tp=2,ep=2", "--moe.load_balance_coeff=" + coeff});
    c.steps = 1;
    const auto reference = run_reference(c);
    const auto report = verify(c, reference);
    EXPECT_TRUE(report.holds()) << report.describe(mesh_shape(c.config));
    return reference["expert bias of MoE layer 0"];
  };
  EXPECT_FALSE(bias_after_one_step("0").any().item<bool>());
  // It is moved by the sign of what an expert lacks, less the mean of that: by less than twice the
  // step, and somewhere by half of it.
  const at::Tensor small = bias_after_one_step("0.001"), large = bias_after_one_step("0.01");
  EXPECT_TRUE(at::allclose(large, 10 * small));
  EXPECT_GE(small.abs().max().item<double>(), 0.5e-3);
  EXPECT_LE(small.abs().max().item<double>(), 2e-3);
}

}  // namespace
}  // namespace moesh::verify
